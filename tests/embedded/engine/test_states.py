"""States of layers in the engine: prompts, rows that share them, decode steps, slots that move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from miles_core.contracts.engine import Sampling
from miles_core.errors import MilesError
from miles_embedded.engine.runner import Runner
from miles_embedded.engine.static_batch import StaticBatch
from miles_embedded.engine.static_step import Shape, StaticStep
from miles_embedded.model.load import load_model
from miles_embedded.model.operations import TORCH, use_operations
from miles_embedded.testing.families import family_checkpoint, lacking

pytestmark = pytest.mark.skipif(bool(lacking("qwen3_next")), reason=lacking("qwen3_next"))

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]


@pytest.fixture(scope="module", params=["qwen3_next", "bamba", "lfm2", "jamba", "nemotron_h"])
def model(request, tmp_path_factory):
    return load_model(family_checkpoint(request.param, tmp_path_factory.mktemp("models") / "model"), "float32")


def start(model, share=(0, 0, 1, 2)):
    runner = Runner(model)
    slots, _, _ = runner.prefixes(PROMPTS, set())
    return runner, runner.cache.add_rows(slots[list(share)].tolist())


def feed(runner, rows, *tokens):
    return [runner.forward(rows, [[t] for t in step], set()).logits for step in tokens]


def alone(model, tokens):
    """Logits after the last token, with the whole sequence as a prompt."""
    runner = Runner(model)
    _, hidden, _ = runner.prefixes([tokens], set())
    return runner.head(hidden)[0]


def test_rows_that_share_a_prompt_continue_its_state_independently(model):
    runner, rows = start(model)
    steps = [(20, 21, 22, 23), (30, 31, 32, 33)]
    last = feed(runner, rows, *steps)[-1]
    for i, prompt in enumerate((0, 0, 1, 2)):
        expected = alone(model, [*PROMPTS[prompt], *(step[i] for step in steps)])
        torch.testing.assert_close(last[i], expected, atol=2e-5, rtol=1e-4)
    assert not torch.equal(last[0], last[1])


def test_a_row_keeps_its_state_when_its_slot_moves_and_the_cache_grows(model):
    runner, rows = start(model)
    feed(runner, rows, (20, 21, 22, 23))
    runner.cache.remove_rows(np.array([0]))  # the last row moves to slot 0, and its prompt stays
    more = runner.cache.add_rows([int(runner.cache.prefix_of[0])] * 9)
    assert runner.cache.own.slots > 8
    found = feed(runner, np.array([0, 1, 2, int(more[-1])]), (33, 31, 32, 40))[0]
    for row, tokens in enumerate(
        ([*PROMPTS[2], 23, 33], [*PROMPTS[0], 21, 31], [*PROMPTS[1], 22, 32], [*PROMPTS[2], 40])
    ):
        torch.testing.assert_close(found[row], alone(model, tokens), atol=2e-5, rtol=1e-4)


def test_a_discarded_step_can_be_computed_again(model):
    runner, rows = start(model)
    feed(runner, rows, (20, 21, 22, 23))
    (first,) = feed(runner, rows, (30, 31, 32, 33))
    runner.cache.own.lengths[rows] -= 1
    assert torch.equal(feed(runner, rows, (30, 31, 32, 33))[0], first)
    with pytest.raises(ValueError, match="the states of its layers after them are gone"):
        runner.cache.cut(rows, [len(PROMPTS[p]) for p in (0, 0, 1, 2)])


def static_step(runner, rows, tokens):
    """Logits of a step in static buffers, computed twice."""
    batch, cache = StaticBatch(4, runner.device), runner.cache
    prompts = cache.prefix_of[rows]
    lengths = cache.own.lengths[rows], prompts, cache.prefixes.lengths[prompts]
    batch.fill(tokens, *lengths, [0] * 4, [Sampling(1).temperature] * 4, [0] * 4)
    step = StaticStep(runner, batch, 0)
    return [step(Shape(4, draws=False)).clone() for _ in range(2)]


def test_a_step_in_static_buffers_agrees_and_can_be_repeated(model):
    runner, rows = start(model)
    feed(runner, rows, (20, 21, 22, 23))
    found, again = static_step(runner, rows, [30, 31, 32, 33])
    assert torch.equal(again, found)
    torch.testing.assert_close(found, feed(runner, rows, (30, 31, 32, 33))[0], atol=2e-5, rtol=1e-4)


def advance_with_torch(query, key, value, decay, beta, states, before, after, normalize):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    given = {"initial_state": states[before], "output_final_state": True}
    out, state = torch_recurrent_gated_delta_rule(
        query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=normalize, **given
    )
    states[after] = state
    return out


def test_a_step_that_stores_its_states_itself_changes_nothing(tmp_path):
    model = load_model(family_checkpoint("qwen3_next", tmp_path / "model"), "float32")
    expected = decode(model)
    calls = []

    def advance(*args):
        calls.append(args)
        return advance_with_torch(*args)

    done = use_operations(model, replace(TORCH, delta_rule=advance))["delta_rule"]
    calls.clear()  # those of the comparison with Transformers' step
    assert done > 0 and torch.equal(decode(model), expected)
    assert len(calls) == 4 * done
    wrong = use_operations(model, replace(TORCH, delta_rule=lambda *args: 2 * advance_with_torch(*args)))
    assert wrong["delta_rule"] == 0 and torch.equal(decode(model), expected)


def decode(model):
    """Logits of three steps, the second one in static buffers."""
    runner, rows = start(model)
    first = feed(runner, rows, (20, 21, 22, 23))
    static, _ = static_step(runner, rows, [30, 31, 32, 33])
    return torch.cat([*first, static, *feed(runner, rows, (30, 31, 32, 33))])


def test_several_tokens_per_step_are_refused(model):
    runner, rows = start(model)
    with pytest.raises(MilesError, match="cannot feed several tokens per step"):
        runner.forward(rows, [[3, 4]] * 4, set())
