"""Rotary frequencies that grow with a sequence: no sequence passes the limit up to which they stay."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import transformers

from miles_core.contracts.engine import Request, Sampling
from miles_core.errors import CheckpointError
from miles_core.testing.tiny import tiny_checkpoint
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model

LIMIT = 16
LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}


@pytest.fixture(params=["longrope", "dynamic"])
def model(request, tmp_path):
    rope = {"rope_type": request.param, "rope_theta": 1e4, "original_max_position_embeddings": LIMIT, "factor": 4.0}
    rope |= LONG if request.param == "longrope" else {}
    return tiny_checkpoint("llama", tmp_path / "model", rope_parameters=rope)


def test_every_sequence_scores_as_transformers_scores_it_alone(model):
    engine = EmbeddedEngine(load_model(model), Settings(str, eos=[]))
    response = asyncio.run(engine.generate(Request([3] * 4, Sampling(40), key=0)))
    assert (len(response.tokens), response.finish) == (LIMIT - 4, "length")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sequences = [[3] * 4 + response.tokens, [5, 6, 7, 8]]
    found = asyncio.run(engine.score(sequences))
    for sequence, scored in zip(sequences, found, strict=True):
        logits = reference(torch.tensor([sequence])).logits[0].log_softmax(-1)
        expected = [logits[i, t].item() for i, t in enumerate(sequence[1:])]
        np.testing.assert_allclose(scored[-len(expected) :], expected, atol=1e-4)
    np.testing.assert_allclose(response.log_probs, found[0][-len(response.tokens) :], atol=1e-4)


def test_a_longer_context_is_refused(model):
    with pytest.raises(CheckpointError, match=r"--rollout-max-context-len 20: .* at most 16 tokens here"):
        EmbeddedEngine(load_model(model), Settings(str, eos=[], max_context=20))
