"""Contract tests for engines.

    class TestMyEngine(EngineContract):
        async def make(self, checkpoint, limits):
            return MyEngine(checkpoint, **vars(limits))

The contract makes tiny random checkpoints (with a tokenizer) and one engine per class. Tests that need a capability the engine lacks
are skipped; the planner refuses runs that need it.

The tests require, in addition to the signatures of ``Engine``:

- ``make`` is asynchronous and returns an engine that is not started; the contract awaits ``start`` and ``stop``.
- A refused update (a missing or unknown tensor) raises a ``MilesError`` that names the tensor, and leaves ``version`` unchanged.
- A response ends with ``finish="length"`` at ``max_new_tokens``, or when prompt and response fill ``max_context``.
- A request that cannot be generated raises a ``MilesError``: for a prompt longer than the context (the message contains both lengths), an
  empty prompt ("empty prompt"), and a field that the engine cannot record (its name).
- All tests of a class share one engine, because starting one is slow. If a test leaves it unusable, later tests fail too: look at the
  first failure, or run one test with ``pytest -k NAME``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from miles_core.contracts.engine import Engine, Sampling
from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.data.weight_unit import Encoded
from miles_core.errors import MilesError, SyncError
from miles_core.mismatch.same_model import COMPARED
from miles_core.plugin.detect import model_facts
from miles_testing.asking import ask
from miles_testing.capabilities import skip_without
from miles_testing.interruptions import Interruptions
from miles_testing.stored import buckets, stored_units
from miles_testing.tiny import tiny_checkpoint, tiny_tokenizer

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15], [3, 4, 5, 6], [3, 4, 5, 6]]
GREEDY = Sampling(10, temperature=0.0, ignore_eos=True)
FREE = Sampling(10, temperature=0.9, ignore_eos=True)


@dataclass(frozen=True)
class Limits:
    """Arguments of the factory: the run's seed, the largest sequence length, and the number of sequences decoded at once."""

    seed: int = 7
    max_context: int = 48
    max_running_requests: int = 4


class EngineContract(Interruptions):
    """Subclass it and implement ``make``.

    Attributes:
        family: model family of ``miles_testing.tiny.FAMILIES``.
        atol: tolerance of log-probabilities of the same tokens (generation and ``score``, or a new load).
        extra: a ``token-1`` field that engines from ``make`` can record, or None.
        hottest: a temperature that the engine supports, at which all tokens have similar probabilities.
    """

    family = "qwen3_moe"
    hottest = 3.0

    async def make(self, checkpoint: Path, limits: Limits) -> Engine:
        """Make an engine that serves ``checkpoint``; do not start it."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def checkpoints(self, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        """Three checkpoints of one architecture with different weights."""
        root = tmp_path_factory.mktemp("engine")
        return [tiny_checkpoint(self.family, root / str(seed), seed) for seed in range(3)]

    @pytest.fixture(scope="class")
    def runner(self) -> Iterator[asyncio.Runner]:
        """Event loop of the class."""
        with asyncio.Runner() as runner:
            yield runner

    @pytest.fixture(scope="class")
    def engine(self, checkpoints: list[Path], runner: asyncio.Runner) -> Iterator[Engine]:
        """A started engine with the first checkpoint's weights as version 0, shared by all tests."""
        engine = runner.run(self.start_engine(checkpoints[0]))
        runner.run(engine.update_weights(stored_units(checkpoints[0]), 0))
        yield engine
        runner.run(engine.stop())

    async def start_engine(self, checkpoint: Path) -> Engine:
        engine = await self.make(checkpoint, Limits())
        await engine.start()
        return engine

    def test_it_says_which_model_it_serves(self, engine: Engine, checkpoints: list[Path]) -> None:
        facts = engine.model_facts()
        if not facts:
            pytest.skip("this engine returns no facts, so a run cannot compare it with the trainer's model")
        config = {f.name: f.value for f in model_facts(str(checkpoints[0]))}
        compared = {f"model.{name}" for name in COMPARED} & facts.keys()
        assert compared and {name: facts[name] for name in compared} == {name: config[name] for name in compared}

    def test_a_change_of_precision_is_declared_where_it_is_possible(self, engine: Engine) -> None:
        assert ("rebuild" in engine.capabilities) == (type(engine).rebuild is not Engine.rebuild)

    # -- generation ---------------------------------------------------------------------------------------------------

    def test_a_response_has_tokens_log_probs_text_and_version(self, engine: Engine, runner: asyncio.Runner) -> None:
        for prompt, response in zip(PROMPTS, ask(runner, engine, PROMPTS, FREE), strict=True):
            assert len(response.tokens) == len(response.log_probs) == 10, prompt
            assert response.finish == "length"
            assert all(isinstance(t, int) and 0 <= t < 64 for t in response.tokens)
            assert all(-50 < p <= 0 for p in response.log_probs)
            assert response.text == tiny_tokenizer().decode(response.tokens, skip_special_tokens=True)
            assert response.weight_versions == [(0, engine.version)]

    def test_greedy_is_deterministic_in_any_batch(self, engine: Engine, runner: asyncio.Runner) -> None:
        together = ask(runner, engine, PROMPTS, GREEDY)
        alone = [ask(runner, engine, [p], GREEDY)[0] for p in PROMPTS]
        assert [r.tokens for r in together] == [r.tokens for r in alone]
        if "score" in engine.capabilities:  # a greedy token's log-probability refers to temperature 1
            scored = runner.run(engine.score([PROMPTS[0] + together[0].tokens]))[0]
            np.testing.assert_allclose(together[0].log_probs, scored[len(PROMPTS[0]) - 1 :], atol=self.atol)

    def test_log_probs_are_those_of_the_sampled_distribution(self, engine: Engine, runner: asyncio.Runner) -> None:
        skip_without(engine, "score", "score_temperature")
        responses = ask(runner, engine, PROMPTS, FREE)
        scored = runner.run(engine.score([p + r.tokens for p, r in zip(PROMPTS, responses, strict=True)], 0.9))
        for prompt, response, row in zip(PROMPTS, responses, scored, strict=True):
            assert row.shape == (len(prompt) + 9,) and row.dtype == np.float32
            np.testing.assert_allclose(response.log_probs, row[len(prompt) - 1 :], atol=self.atol)

    def test_a_token_depends_on_seed_key_and_position_alone(self, engine: Engine, runner: asyncio.Runner) -> None:
        skip_without(engine, "keyed_sampling")
        together = ask(runner, engine, PROMPTS, FREE)
        alone = [ask(runner, engine, [p], FREE, first_key=i)[0] for i, p in enumerate(PROMPTS)]
        assert [r.tokens for r in together] == [r.tokens for r in alone]
        assert len({tuple(r.tokens) for r in (together[0], together[3], together[4])}) == 3  # one prompt, three keys
        prefix = together[2].tokens[:4]
        resumed = ask(runner, engine, [PROMPTS[2] + prefix], replace(FREE, max_new_tokens=6), first_key=2)[0]
        assert resumed.tokens == together[2].tokens[4:]

    def test_stop_conditions(self, engine: Engine, runner: asyncio.Runner) -> None:
        full = ask(runner, engine, [PROMPTS[0]], GREEDY)[0]
        ids = next(i for i in range(2, 10) if full.tokens[i] not in full.tokens[:i])
        cut = replace(GREEDY, stop_token_ids=(full.tokens[ids],))
        response = ask(runner, engine, [PROMPTS[0]], cut)[0]
        assert (response.tokens, response.finish) == (full.tokens[: ids + 1], "stop")
        stop = full.text[3:5]
        response = ask(runner, engine, [PROMPTS[0]], replace(GREEDY, stop=(stop,)))[0]
        end = full.text.index(stop)
        assert response.finish == "stop" and response.text == full.text[:end]
        assert response.tokens == full.tokens[: len(response.tokens)] and len(response.tokens) <= 6
        response = ask(runner, engine, [[2] * 40], replace(GREEDY, max_new_tokens=100))[0]
        assert (len(response.tokens), response.finish) == (Limits().max_context - 40, "length")

    def test_the_end_token_ends_unless_ignored(self, engine: Engine, runner: asyncio.Runner) -> None:
        hot = Sampling(30, temperature=self.hottest)
        responses = ask(runner, engine, [PROMPTS[1]] * 24, hot)
        ended = [r for r in responses if r.finish == "stop"]
        assert ended and all(r.tokens[-1] == 1 and 1 not in r.tokens[:-1] for r in ended)
        assert all(len(r.tokens) == 30 for r in responses if r.finish == "length")
        ignoring = ask(runner, engine, [PROMPTS[1]] * 24, replace(hot, ignore_eos=True))
        assert all(r.finish == "length" for r in ignoring) and any(1 in r.tokens[:-1] for r in ignoring)

    def test_requests_that_cannot_be_generated_are_refused_in_words(
        self, engine: Engine, runner: asyncio.Runner
    ) -> None:
        with pytest.raises(MilesError, match=r"60 tokens.* 48"):
            ask(runner, engine, [[2] * 60], FREE)
        with pytest.raises(MilesError, match="empty prompt"):
            ask(runner, engine, [[]], FREE)
        with pytest.raises(MilesError, match="no_such_field"):
            ask(runner, engine, [[2, 3]], FREE, extras={"no_such_field"})
        assert len(ask(runner, engine, [[2, 3]], FREE)[0].tokens) == 10  # and the engine still works

    def test_a_truncated_sampler_keeps_the_best_tokens(self, engine: Engine, runner: asyncio.Runner) -> None:
        """Applies to all engines, whether or not they can record the support."""
        greedy = [r.tokens for r in ask(runner, engine, PROMPTS, GREEDY)]
        for one_token in (replace(FREE, top_k=1), replace(FREE, top_p=1e-6)):
            assert [r.tokens for r in ask(runner, engine, PROMPTS, one_token)] == greedy

    # -- recorded fields --------------------------------------------------------------------------------------------

    def test_sampling_support(self, engine: Engine, runner: asyncio.Runner) -> None:
        skip_without(engine, "sampling_support")
        name = SAMPLING_SUPPORT.name
        sampling = replace(FREE, top_k=5, top_p=0.8)
        for response in ask(runner, engine, PROMPTS, sampling, extras={name}):
            rows = response.extras[name]
            assert len(rows) == 10 and response.metrics[f"{name}_capped"] == 0
            for token, log_prob, support in zip(response.tokens, response.log_probs, rows, strict=True):
                assert token in support and len(set(support)) == len(support) <= 5
                if len(support) == 1:
                    assert log_prob == pytest.approx(0.0, abs=1e-6)
        single = ask(runner, engine, PROMPTS, replace(FREE, top_k=1), extras={name})
        assert [r.tokens for r in single] == [r.tokens for r in ask(runner, engine, PROMPTS, GREEDY)]
        silent = ask(runner, engine, PROMPTS[:1], sampling)[0]
        assert name not in silent.extras
        if {"score", "score_temperature"} <= engine.capabilities:  # without the field: over the full vocabulary
            scored = runner.run(engine.score([PROMPTS[0] + silent.tokens], 0.9))[0]
            np.testing.assert_allclose(silent.log_probs, scored[len(PROMPTS[0]) - 1 :], atol=self.atol)

    def test_log_probs_are_renormalised_over_the_support(self, engine: Engine, runner: asyncio.Runner) -> None:
        skip_without(engine, "sampling_support", "score", "score_temperature")
        name, prompt = SAMPLING_SUPPORT.name, PROMPTS[2]
        response = ask(runner, engine, [prompt], Sampling(1, temperature=0.7, top_p=0.9), extras={name})[0]
        support = [int(t) for t in response.extras[name][0]]
        scores = runner.run(engine.score([[*prompt, t] for t in support], 0.7))
        kept = np.array([row[-1] for row in scores], np.float64)
        expected = kept[support.index(response.tokens[0])] - np.log(np.exp(kept).sum())
        assert response.log_probs[0] == pytest.approx(expected, abs=self.atol)
        assert np.exp(kept).sum() >= 0.9 - 1e-4 and np.exp(np.sort(kept)[1:]).sum() < 0.9 + 1e-4

    def test_a_recorded_field_has_a_row_for_every_token_but_the_last(
        self, engine: Engine, runner: asyncio.Runner
    ) -> None:
        if self.extra is None:
            pytest.skip("this engine records no token field")
        sampling = FREE if "keyed_sampling" in engine.capabilities else GREEDY  # either generates the same tokens again
        together = ask(runner, engine, PROMPTS, sampling, extras={self.extra})
        for i, (prompt, response) in enumerate(zip(PROMPTS, together, strict=True)):
            rows = np.asarray(response.extras[self.extra])
            assert len(rows) == len(prompt) + len(response.tokens) - 1
            alone = ask(runner, engine, [prompt], sampling, first_key=i, extras={self.extra})[0]
            np.testing.assert_array_equal(rows, np.asarray(alone.extras[self.extra]))
            one = replace(FREE, max_new_tokens=1)
            longer = ask(runner, engine, [[*prompt, *response.tokens]], one, extras={self.extra})[0]
            np.testing.assert_array_equal(rows, np.asarray(longer.extras[self.extra])[: len(rows)])

    # -- weights ----------------------------------------------------------------------------------------------------

    def test_two_updates_equal_a_fresh_load(
        self, engine: Engine, runner: asyncio.Runner, checkpoints: list[Path]
    ) -> None:
        old, before = engine.version, ask(runner, engine, PROMPTS, GREEDY)
        for seed in (1, 2):
            runner.run(engine.update_weights(stored_units(checkpoints[seed]), old + seed))
            assert engine.version == old + seed
        updated = [*ask(runner, engine, PROMPTS, GREEDY), *ask(runner, engine, PROMPTS, FREE)]
        runner.run(engine.update_weights(stored_units(checkpoints[0]), old + 3))
        assert ask(runner, engine, PROMPTS, GREEDY)[0].tokens == before[0].tokens
        fresh = runner.run(self.start_engine(checkpoints[2]))
        try:
            loaded = [*ask(runner, fresh, PROMPTS, GREEDY), *ask(runner, fresh, PROMPTS, FREE)]
        finally:
            runner.run(fresh.stop())
        assert [r.tokens for r in updated[:5]] == [r.tokens for r in loaded[:5]]
        assert [r.tokens for r in updated[:5]] != [r.tokens for r in before]
        if "keyed_sampling" in engine.capabilities:
            for a, b in zip(updated, loaded, strict=True):
                np.testing.assert_allclose(a.log_probs, b.log_probs, atol=self.atol)

    def test_an_incomplete_or_foreign_update_is_refused_by_name(
        self, engine: Engine, runner: asyncio.Runner, checkpoints: list[Path]
    ) -> None:
        units, version = stored_units(checkpoints[0]), engine.version
        with pytest.raises(MilesError, match=units[3].name):
            runner.run(engine.update_weights([*units[:3], *units[4:]], version + 1))
        foreign = Encoded("no.such.weight", {"no.such.weight": units[0].parts[units[0].name]})
        with pytest.raises(MilesError, match=r"no\.such\.weight"):
            runner.run(engine.update_weights([*units, foreign], version + 1))
        assert engine.version == version
        runner.run(engine.update_weights(units, version + 1))
        assert len(ask(runner, engine, PROMPTS[:1], FREE)[0].tokens) == 10

    def test_buckets_are_taken_whole_or_not_at_all(
        self, engine: Engine, runner: asyncio.Runner, checkpoints: list[Path], tmp_path: Path
    ) -> None:
        skip_without(engine, "transport:buckets")
        old, before = engine.version, ask(runner, engine, PROMPTS, GREEDY)
        in_a_file, in_messages = buckets(checkpoints[1], tmp_path / "bucket"), buckets(checkpoints[0])
        for number, message in enumerate(in_a_file):
            runner.run(engine.receive(message, old + 1, number == len(in_a_file) - 1))
        assert engine.version == old + 1
        assert [r.tokens for r in ask(runner, engine, PROMPTS, GREEDY)] != [r.tokens for r in before]
        runner.run(engine.receive(in_messages[0], old + 2, False))
        with pytest.raises(SyncError, match="checksum"):
            runner.run(engine.receive({**in_messages[1], "checksum": 1}, old + 2, True))
        assert engine.version == old + 1
        with pytest.raises(MilesError):  # an incomplete version must not be served
            ask(runner, engine, PROMPTS[:1], GREEDY)
        with pytest.raises(SyncError, match="bucket 1"):
            runner.run(engine.receive(in_messages[1], old + 2, True))
        for number, message in enumerate(in_messages):
            runner.run(engine.receive(message, old + 2, number == len(in_messages) - 1))
        assert engine.version == old + 2
        assert [r.tokens for r in ask(runner, engine, PROMPTS, GREEDY)] == [r.tokens for r in before]

    def test_sleep_and_wake(self, engine: Engine, runner: asyncio.Runner, checkpoints: list[Path]) -> None:
        before = ask(runner, engine, PROMPTS, GREEDY)
        if "sleep" in engine.capabilities:  # if only the cache sleeps, the engine still has its weights
            runner.run(engine.sleep(["cache"]))
            runner.run(engine.sleep(["cache"]))
            runner.run(engine.wake(["cache"]))
            assert [r.tokens for r in ask(runner, engine, PROMPTS, GREEDY)] == [r.tokens for r in before]
            runner.run(engine.sleep(["weights"]))
        runner.run(engine.sleep())
        runner.run(engine.wake(["weights"]))
        runner.run(engine.wake(["weights"]))
        runner.run(engine.update_weights(stored_units(checkpoints[0]), engine.version + 1))
        runner.run(engine.wake(["cache"]))
        assert [r.tokens for r in ask(runner, engine, PROMPTS, GREEDY)] == [r.tokens for r in before]
