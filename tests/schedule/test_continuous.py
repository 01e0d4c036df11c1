"""Generation without an end: bounded by staleness, drained or interrupted at a push."""

from __future__ import annotations

import pytest

from miles_core.contracts.engine import Response
from miles_core.errors import DataError
from miles_embedded.engine.engine import EmbeddedEngine

#: The second group's responses are so long that weights change several times meanwhile.
LONG = """
async def generate(args, sample, sampling_params):
    length = 90 if sample.group_index == 1 else 2
    answer = await args.generate(sample.tokens, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})
    sample.tokens = sample.tokens + answer.tokens
    sample.response, sample.response_length = answer.text, len(answer.tokens)
    return sample
"""


@pytest.fixture
def long(tmp_path):
    (tmp_path / "long.py").write_text(LONG)
    return {"schedule": "async", "custom_generate_function_path": tmp_path / "long.py", "steps": 10}


def versions_of(run):
    """Step by step, the versions of each sample that is trained on."""
    samples = run.run.state["samples"]
    return [[{v for _, v in samples[i].weight_versions} for i in batch] for batch in run.run.state["trained"]]


@pytest.mark.parametrize("bound", [1, 3])
def test_no_sample_is_older_than_the_bound(watched, bound):
    run = watched(schedule="async", partial_rollout=False, max_weight_staleness=bound, steps=8)
    for step, samples in enumerate(versions_of(run)):
        assert all(len(found) == 1 and step - bound <= min(found) <= step for found in samples)
    assert max(m["rollout/staleness_max"] for m in run.metrics) == bound
    assert {m["rollout/dropped_groups"] for m in run.metrics} == {0}


def test_a_long_response_is_finished_before_a_push(watched, long):
    run = watched(**long, max_weight_staleness=2, partial_rollout=False)
    assert all(len(found) == 1 for samples in versions_of(run) for found in samples)
    assert max(m["rollout/length_max"] for m in run.metrics) == 90


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("plugins", [[], ["r3", "tis"]], ids=["bare", "r3+tis"])
def test_a_long_response_goes_on_under_new_weights(watched, long, mode, plugins):
    given = {"stale_samples": "train", "pause_generation_mode": mode}
    run = watched(plugins, **long, **given)
    samples = run.run.state["samples"]
    mixed = [samples[i] for batch in run.run.state["trained"] for i in batch if samples[i].response_length == 90]
    assert len(mixed) == 4
    for sample in mixed:
        versions = [version for _, version in sample.weight_versions]
        starts = [index for index, _ in sample.weight_versions]
        assert len(set(versions)) > 2 and versions == sorted(versions) and starts[0] == sample.prompt_length
        assert len(sample.rollout_log_probs) == 90 and all(p < 0 for p in sample.rollout_log_probs)
        if plugins:
            assert sample.rollout_routed_experts.shape[0] == len(sample.tokens) - 1
            assert (sample.rollout_routed_experts >= 0).all()
    assert max(m["rollout/staleness_max"] for m in run.metrics) > 2
    tokens = [m["rollout/stale_tokens"] for m in run.metrics]
    assert any(0 < fraction < 1 for fraction in tokens)


def test_groups_that_got_too_old_are_dropped_and_their_prompts_sent_again(watched, long):
    run = watched(**long)
    assert sum(m["rollout/dropped_groups"] for m in run.metrics) == 1
    samples, trained = run.run.state["samples"], [i for batch in run.run.state["trained"] for i in batch]
    assert samples[4].response_length == 90 and 4 not in trained  # of group 1
    assert any(samples[i].prompt == samples[4].prompt for i in trained)
    assert max(m["rollout/staleness_max"] for m in run.metrics) <= 1


def test_off_policy_tokens_can_be_left_out_of_the_loss(watched, long):
    run = watched(**long, mask_offpolicy_in_partial_rollout=True)
    samples = run.run.state["samples"]
    trained = [samples[i] for batch in run.run.state["trained"] for i in batch]
    (sample, *_) = [s for s in trained if s.response_length == 90]
    newest = max(version for _, version in sample.weight_versions)
    first = next(index for index, version in sample.weight_versions if version == newest) - sample.prompt_length
    assert 0 < first < 90 and sample.mask == [0] * first + [1] * (90 - first)
    assert set(sample.rollout_log_probs[:first]) == {0.0}
    assert sum(m["rollout/dropped_groups"] for m in run.metrics) == 0  # what is trained on is new enough


def test_the_engine_is_paused_while_weights_change(watched, long, monkeypatch):
    seen = []
    plain = EmbeddedEngine.update_weights

    async def update(self, units, version):
        seen.append((self.paused, len(self.rows)))
        await plain(self, units, version)

    monkeypatch.setattr(EmbeddedEngine, "update_weights", update)
    watched(**long, pause_generation_mode="in_place")
    assert all(paused for paused, _ in seen) and any(rows for _, rows in seen)


def test_samples_that_are_ready_are_in_the_checkpoint(toy_run, tmp_path):
    options = {"schedule": "async", "max_weight_staleness": 3, "rollout_max_response_len": 6}
    toy_run(["r3"], directory=tmp_path / "run", steps=6, save_interval=2, **options)
    load = tmp_path / "run/checkpoints/step_00000002"
    again = toy_run(["r3"], directory=tmp_path / "again", steps=6, load=load, **options)
    assert [m["step"] for m in again.metrics] == [3, 4, 5, 6]
    assert again.metrics[0]["rollout/staleness_max"] > 0  # trained on what was kept


def test_verification_holds_while_other_requests_are_in_flight(watched, long):
    run = watched(**long, verify_logprobs=True, verify_logprobs_tolerance=1e-3)
    assert max(m["verify/abs_log_prob"] for m in run.metrics) < 1e-4


def test_a_group_that_fails_ends_the_run_with_its_error(toy_run, tmp_path):
    (tmp_path / "reward.py").write_text(
        "async def reward(args, sample):\n    if sample.group_index == 5:\n        return None\n    return sample.index % 3\n"
    )
    with pytest.raises(DataError, match=r"sample 2\d"):
        toy_run(schedule="async", steps=6, custom_rm_path=tmp_path / "reward.py")


def test_what_the_engine_says_about_requests_reaches_on_step(toy_run, tmp_path, monkeypatch):
    (tmp_path / "step.py").write_text(
        "from miles_core.plugin import hookimpl\n\n@hookimpl\ndef on_step(run, metrics):\n"
        "    run.state.setdefault('seen', []).append(metrics.get('engine/cost'))\n"
    )
    plain = EmbeddedEngine.generate

    async def generate(self, request):
        answer: Response = await plain(self, request)
        answer.metrics["cost"] = float(request.key % 4)
        return answer

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    run = toy_run([str(tmp_path / "step.py")], steps=2)
    assert run.run.state["seen"] == [1.5, 1.5] and run.metrics[0]["engine/cost"] == 1.5
