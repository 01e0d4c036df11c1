import json

import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_core.mismatch import at_sync as v
from miles_core.mismatch.budget import WEIGHTS
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.model.views import export


def read_budget(run, policy="policy"):
    return json.loads((run.directory / v.BUDGET_FILE).read_text())[policy]


def values(run, name):
    return [r[name] for r in run.metrics if name in r]


def test_it_is_off_by_default(toy_run):
    run = toy_run()
    assert not any(name.startswith("verify/") for r in run.metrics for name in r)
    assert not (run.directory / v.BUDGET_FILE).exists()


def test_a_sound_run_agrees_after_every_sync(toy_run):
    run = toy_run(verify_logprobs=True, verify_logprobs_tolerance=1e-5, steps=3)
    assert len(values(run, "verify/abs_log_prob")) == 3
    assert max(values(run, "verify/abs_log_prob_max")) < 1e-5
    assert values(run, "verify/moved") == pytest.approx([1, 1, 1], abs=0.01)
    budget = read_budget(run)
    assert budget["version"] == 0 and budget["total"]["mean_abs"] < 1e-5


def test_probes_change_no_training_sample(toy_run):
    with_probes, without = toy_run(verify_logprobs=True), toy_run()
    assert values(with_probes, "train/loss") == values(without, "train/loss")
    assert values(with_probes, "reward/mean") == values(without, "reward/mean")


def test_a_gap_beyond_the_tolerance_stops_the_run_and_shows_tokens(toy_run):
    flags = {"rollout_precision": "fp8", "emulate_precision": True, "family": "qwen3"}
    with pytest.raises(v.MismatchError) as caught:
        toy_run(["fp8"], verify_logprobs=True, verify_logprobs_tolerance=0.01, **flags)
    gap, text = caught.value.gap, str(caught.value)
    assert gap.mean_abs > 0.01
    assert "--verify-logprobs-tolerance 0.01" in text and f"{WEIGHTS} " in text
    worst = gap.worst[0]
    assert abs(worst.delta) == gap.max_abs
    assert str(worst) in text and f"engine {worst.engine:.4f}, trainer {worst.trainer:.4f}" in text


@pytest.mark.parametrize("plugins", [("fp8",), ("fp8", "r3")])
def test_a_small_step_in_low_precision_is_not_called_stale(toy_run, plugins):
    for lr in (1e-6, 1e-4, 1e-3):
        toy_run(
            plugins,
            lr=lr,
            rollout_precision="fp8",
            emulate_precision=True,
            verify_logprobs=True,
            verify_logprobs_tolerance=1,
            steps=3,
        )


@pytest.fixture
def unknown_layout(monkeypatch):
    """Only the scores of the engine can be compared."""
    monkeypatch.setattr(EmbeddedEngine, "capabilities", EmbeddedEngine.capabilities - {"weight_checksums"})


def test_an_engine_that_ignores_an_update_is_caught(toy_run, monkeypatch, unknown_layout):
    take = EmbeddedEngine.update_weights

    async def ignore(self, units, version):
        if version == 2:
            list(units)
            self._weights.version = version
        else:
            await take(self, units, version)

    monkeypatch.setattr(EmbeddedEngine, "update_weights", ignore)
    for lr in (1e-3, 1e-5):
        with pytest.raises(v.MismatchError, match=r"stale weights: version 2 .* still serves the previous weights"):
            toy_run(verify_logprobs=True, verify_logprobs_tolerance=5, steps=3, lr=lr)


def test_half_an_update_is_caught(toy_run, monkeypatch, unknown_layout):
    take = EmbeddedEngine.update_weights

    async def half(self, units, version):
        if version == 2:
            old = {n: t.clone() for u in export(self.model) for n, t in u.tensors.items()}
            late = ("embed", "layers.0")
            units = (Encoded(u.name, {u.name: old[u.name]}) if any(x in u.name for x in late) else u for u in units)
        await take(self, units, version)

    monkeypatch.setattr(EmbeddedEngine, "update_weights", half)
    with pytest.raises(v.MismatchError, match=r"stale weights: version 2 .* part of the update is missing"):
        toy_run(verify_logprobs=True, verify_logprobs_tolerance=5, steps=3, rollout_max_response_len=32)


def test_an_engine_that_reports_an_older_version_is_named(toy_run, monkeypatch):
    monkeypatch.setattr(EmbeddedEngine, "version", property(lambda self: min(self._weights.version, 1)))
    with pytest.raises(v.MismatchError, match="serves version 1 although version 2 was synced"):
        toy_run(verify_logprobs=True)


def test_a_worker_that_stamps_older_tokens_is_named(toy_run, monkeypatch):
    generate = EmbeddedEngine.generate

    async def late(self, request):
        response = await generate(self, request)
        response.weight_versions = [(0, min(self._weights.version, 1))]
        return response

    monkeypatch.setattr(EmbeddedEngine, "generate", late)
    with pytest.raises(v.MismatchError, match="generated with weight version 1 after version 2 was synced"):
        toy_run(verify_logprobs=True)


def test_an_engine_that_cannot_score_is_compared_by_what_it_sampled(toy_run, monkeypatch):
    monkeypatch.setattr(EmbeddedEngine, "capabilities", EmbeddedEngine.capabilities - {"score"})
    run = toy_run(verify_logprobs=True)
    assert values(run, "verify/abs_log_prob") and not values(run, "verify/moved")


def test_broken_log_probs_count_as_an_infinite_gap(toy_run, monkeypatch):
    generate = EmbeddedEngine.generate

    async def broken(self, request):
        response = await generate(self, request)
        response.log_probs[-1] = float("nan")
        return response

    monkeypatch.setattr(EmbeddedEngine, "generate", broken)
    with pytest.raises(v.MismatchError, match="disagree by inf nats"):
        toy_run(verify_logprobs=True, verify_logprobs_tolerance=100)


def test_a_truncated_sampler_at_a_temperature(toy_run):
    run = toy_run(verify_logprobs=True, verify_logprobs_tolerance=1e-4, rollout_top_p=0.8, rollout_temperature=0.7)
    assert max(values(run, "verify/abs_log_prob")) < 1e-4
    assert torch.tensor(values(run, "verify/moved")).sub(1).abs().max() < 0.01


def test_a_change_of_number_format_is_no_stale_engine(toy_run):
    run = toy_run(
        ["fp8"],
        steps=3,
        rollout_precision="fp8",
        emulate_precision=True,
        warmup_steps=2,
        verify_logprobs=True,
        verify_logprobs_tolerance=5,
    )
    gaps = values(run, "verify/abs_log_prob")
    assert gaps[0] < 1e-5 < 0.01 < gaps[-1]
    assert len(values(run, "verify/moved")) == 1
    causes = read_budget(run)["causes"]
    assert WEIGHTS not in [c["name"] for c in causes]  # at version 0 nothing was quantised
