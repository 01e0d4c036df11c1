"""Does this model, run as engine and trainer run it, say what the plain Transformers model says?

A family that nobody tried may compute something of its own in a place where packed sequences or cached keys matter: positions that
are counted over a whole call, a cache that two attentions share, a recurrent state. Trained, it would be wrong without a word. So
when the engine is built, two short sequences are scored in one call, and fed token by token behind cached prompts, and both are
held against ordinary forwards of the same module, one sequence a call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from miles_core.errors import CheckpointError
from miles_embedded.engine.runner import Runner
from miles_embedded.model.configuration import configuration
from miles_embedded.model.load import NAME

log = logging.getLogger(__name__)

#: Lengths of the sequences, and the tokens that are fed behind cached ones.
LENGTHS, PROMPT, FED = (17, 9), 5, 3
#: Mean |difference| of log-probabilities, in nats, that rounding explains: sums in another order, and routers that tip over.
TOLERANCE = {torch.float32: 5e-3, torch.float64: 5e-3}
TOLERANCE_LOW = 0.3


def self_check(model: nn.Module) -> None:
    """Compare scores and a decode with plain forwards.

    Raises:
        CheckpointError: they differ by more than rounding, or the model cannot be run in this way.
    """
    runner = Runner(model)
    generator = torch.Generator().manual_seed(0)
    usual = torch.tensor(_usual_tokens(model, runner.vocabulary))
    sequences = [usual[torch.randint(len(usual), (n,), generator=generator)].tolist() for n in LENGTHS]
    try:
        with plain(model):
            expected = [_alone(model, sequence) for sequence in sequences]
    except Exception as error:  # the family's own code without ours: nothing to hold ours against
        log.warning("%s was not compared with its plain forward, which fails: %s", type(model).__name__, error)
        return
    try:
        scored = runner.score(sequences, 1.0)
        decoded = _decoded(runner, sequences)
    except Exception as error:
        raise CheckpointError(
            f"{type(model).__name__} cannot be run by the embedded backend ({type(error).__name__}: {error}); use another engine "
            "and trainer"
        ) from error
    fed = [e[PROMPT : PROMPT + FED] for e in expected]
    for what, found, right in (
        ("packed sequences are scored", scored, expected),
        ("tokens are generated", decoded, fed),
    ):
        gap = float(np.mean(np.abs(np.concatenate(found) - np.concatenate(right))))
        if not gap <= TOLERANCE.get(next(model.parameters()).dtype, TOLERANCE_LOW):
            raise CheckpointError(
                f"{type(model).__name__} is not computed rightly by the embedded backend: where {what}, log-probs differ from "
                f"those of Transformers by {gap:.2g} nats a token; use another engine and trainer (--no-self-check runs it all "
                "the same)"
            )


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """While this is open the model attends, and runs its experts, by Transformers' own functions."""
    named: Any = model
    named.set_attn_implementation("eager")
    named.set_experts_implementation("eager")
    try:
        yield
    finally:
        named.set_attn_implementation(NAME)
        named.set_experts_implementation(NAME)


def _usual_tokens(model: nn.Module, vocabulary: int) -> list[int]:
    """Ids that stand for text and not for an image, where a model has such."""
    given = [v for k, v in configuration(model).to_dict().items() if k.endswith(("_token_id", "_token_index"))]
    special = {token for v in given for token in (v if isinstance(v, list) else [v])}
    return [token for token in range(vocabulary) if token not in special]


@torch.no_grad()
def _alone(model: nn.Module, sequence: list[int]) -> np.ndarray:
    """log p of every token after the first, [len - 1], by one ordinary forward."""
    ids = torch.tensor([sequence], device=next(model.parameters()).device)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float().log_softmax(-1)
    return logits.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()


def _decoded(runner: Runner, sequences: list[list[int]]) -> list[np.ndarray]:
    """log p of the tokens after each of ``FED`` tokens that are fed one by one behind cached prompts, [FED] each."""
    slots, _, _ = runner.prefixes([s[:PROMPT] for s in sequences], set())
    rows = runner.cache.add_rows(slots.tolist())
    steps = []
    for at in range(PROMPT, PROMPT + FED):
        logits = runner.forward(rows, [[s[at]] for s in sequences], set()).logits.float().log_softmax(-1).cpu()
        steps.append([logits[i, s[at + 1]].item() for i, s in enumerate(sequences)])
    return list(np.array(steps, np.float32).T)
