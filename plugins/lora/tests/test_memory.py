"""The activations that the plan counts are those that autograd keeps, in training with and without adapters."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import pytest
from torch.autograd.graph import saved_tensors_hooks

from miles_core.plugin import Fact, Facts
from miles_embedded import Frozen, model_size
from miles_embedded.memory.usage import Training, activations
from miles_embedded.trainer.trainer import EmbeddedTrainer
from miles_lora.memory import frozen_parts
from miles_testing import plan, toy_run

SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
#: Options of the runs: one micro-batch of half a thousand tokens.
RUN = {
    "steps": 1,
    "dtype": "bfloat16",
    "rollout_max_response_len": 64,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 9999,
}
PUBLISHED = Path(__file__).parents[3] / "tests" / "published"


class Kept:
    """A tensor that autograd keeps. Detached, because a result of the operation that keeps it would be part of a cycle."""

    total = peak = 0
    held: ClassVar[Counter[int]] = Counter()

    def __init__(self, tensor):
        self.tensor, self.storage = tensor.detach(), tensor.untyped_storage()
        Kept.held[self.storage.data_ptr()] += 1
        if Kept.held[self.storage.data_ptr()] == 1:
            Kept.total += self.storage.nbytes()
            Kept.peak = max(Kept.peak, Kept.total)

    def __del__(self):
        Kept.held[self.storage.data_ptr()] -= 1
        if not Kept.held[self.storage.data_ptr()]:
            Kept.total -= self.storage.nbytes()


def measure(targets, recompute):
    """Return the most bytes per token that autograd keeps at once in a step, without parameters."""
    found = []
    plain = EmbeddedTrainer.step

    def step(self, batch, *args, **named):
        own = {each.untyped_storage().data_ptr() for each in (*self.model.parameters(), *self.model.buffers())}
        Kept.total = Kept.peak = 0
        Kept.held.clear()

        def pack(tensor):
            return tensor if tensor.untyped_storage().data_ptr() in own else Kept(tensor)

        with saved_tensors_hooks(pack, lambda kept: kept.tensor if isinstance(kept, Kept) else kept):
            result = plain(self, batch, *args, **named)
        found.append(Kept.peak / len(batch.tokens))
        return result

    plugins, options = (["lora"], {"lora_target_modules": targets, "lora_rank": 2}) if targets else ([], {})
    with patch.object(EmbeddedTrainer, "step", step):
        toy_run(plugins, family="llama", sizes=SIZES, recompute_activations=recompute or None, **RUN, **options)
    return found[0]


def estimate(targets, recompute):
    """Return the bytes per token that the plan counts."""
    values = {key: SIZES.get(key, 2) for key in ("vocab_size", *SIZES)}
    facts = Facts([Fact("lora.target_modules", targets, "test")])
    how = Training(2, 1, False, 1000, recompute, False, frozen=frozen_parts(facts) if targets else None)
    size = model_size({"model_type": "llama", **values}, 0)
    assert size is not None
    return activations(size, how) / 1000


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_keep_less_by_what_the_plan_counts(recompute):
    full, counted = measure("", recompute), estimate("", recompute)
    for targets in ("q_proj,v_proj", "all-linear"):
        less, counted_less = full - measure(targets, recompute), counted - estimate(targets, recompute)
        # not counted: the outputs of the final norm and, on a CPU, of each attention, and what the adapters themselves keep
        assert 0.6 * less < counted_less < 1.1 * less


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("q_proj,v_proj", Frozen(True, False, False)),
        ("model.layers.0.mlp.up_proj", Frozen(False, True, False)),
        ("down_proj", Frozen(False, False, True)),
        ("all-linear", Frozen(True, True, True)),
        ("experts.gate_up_proj", Frozen(False, True, True)),
    ],
)
def test_adapters_read_the_inputs_of_their_matrices(targets, expected):
    assert frozen_parts(Facts([Fact("lora.target_modules", targets, "test")])) == expected


def test_the_plan_of_adapters_counts_fewer_activations(tmp_path):
    shutil.copy(PUBLISHED / "llama3.1-8b.json", tmp_path / "config.json")
    given = {"hf_checkpoint": tmp_path, "max_tokens_per_gpu": 8192, "device": "cuda", "facts": ["hardware=B200"]}
    given |= {"rollout_max_response_len": 256, "use_dynamic_batch_size": True}
    few, many = (plan(["lora"], lora_target_modules=t, **given).reviews[0] for t in ("q_proj,v_proj", "all-linear"))
    activations = [float(re.search(r"trainer, rank(?: +[0-9.]+){3} +([0-9.]+)", text)[1]) for text in (few, many)]
    # 32 layers keep the output of the second norm, and the input of the last matrix
    assert activations[1] - activations[0] == pytest.approx(8192 * 32 * 2 * (4096 + 14336) / 1e9, abs=0.11)
