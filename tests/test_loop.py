"""The whole loop on a tiny model: what it does with each option, seen from its metrics and its files."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from miles_core.algorithm.choices import ALGORITHMS
from miles_core.errors import DataError
from miles_testing import toy_files, toy_run


def values(run, name):
    """A metric, step by step."""
    return [record[name] for record in run.metrics if name in record]


def lines(path, rows):
    """A JSONL file of ``rows``."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_learns(toy_run):
    run = toy_run(steps=12, rollout_batch_size=8, n_samples_per_prompt=8, lr=5e-3)
    rewards = values(run, "reward/mean")
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert first < 0.65 and last > first + 0.2, rewards


def test_what_a_run_leaves_behind(toy_run, tmp_path):
    run = toy_run(steps=3, save_interval=2, export_hf=tmp_path / "exported")
    assert {p.name for p in run.directory.iterdir()} == {
        ".lock",
        "checkpoints",
        "ending.json",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "plan.json",
        "rollouts",
        "run.log",
    }
    assert sorted(p.name for p in (run.directory / "checkpoints").iterdir()) == ["step_00000002", "step_00000003"]
    checkpoint = run.directory / "checkpoints" / "step_00000003"
    files = {p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file()}
    assert {"manifest.json", "state/run.json", "policy/trainer/model.safetensors"} <= files
    assert json.loads((run.directory / "plan.json").read_text())["digest"] == run.run.plan.digest
    assert [s["step"] for s in run.samples] == [1] * 8 + [2] * 8 + [3] * 8
    assert all(s["prompt"] and s["response"] for s in run.samples)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    start = load_file(toy_files() / "model" / "model.safetensors")
    assert exported.keys() == start.keys()
    assert any(not torch.equal(exported[name], start[name]) for name in start)


def test_every_step_reports_reward_rollout_mismatch_loss_sync_and_time(toy_run):
    for number, record in enumerate(toy_run().metrics, start=1):
        assert record["step"] == number and record["rollout/samples"] == 8
        assert abs(record["mismatch/kl_k3"]) < 1e-6 and record["mismatch/abs_log_prob"] < 1e-4
        assert record["train/grad_norm"] > 0 and record["train/lr"] == 1e-3 and record["sync/bytes"] > 0
        phases = [name for name in record if name.startswith("time/")]
        assert {"time/rollout", "time/prepare", "time/train", "time/sync", "time/step"} <= set(phases)
        parts = sum(record[n] for n in ("time/rollout", "time/prepare", "time/train"))
        assert 0 < parts <= record["time/step"]
        assert all(math.isfinite(value) for value in record.values())


def test_the_effective_configuration_can_be_run_again(toy_run, tmp_path):
    from miles_core.config.load import load

    run = toy_run(["tis"], rollout_top_k=5)
    again = load(["--config", str(run.directory / "config.yaml")])
    assert again == run.run.config and again.rollout.top_k == 5 and again.plugins == ("tis",)


def test_evaluation_before_the_first_and_after_every_nth_and_the_last_step(toy_run, tmp_path):
    held_out = lines(tmp_path / "eval.jsonl", [{"input": "z"}, {"input": "y"}])
    run = toy_run(steps=3, eval_interval=2, eval_prompt_data=held_out, n_samples_per_eval_prompt=2, lr=0.0)
    found = {record["step"]: record for record in run.metrics if "eval/reward" in record}
    assert list(found) == [0, 2, 3]
    # the same weights and the same random numbers give the same score
    assert len({(r["eval/reward"], r["eval/length_mean"]) for r in found.values()}) == 1


def test_a_warm_start_teaches_the_answers_before_the_first_rollout(toy_run, tmp_path):
    pairs = lines(tmp_path / "pairs.jsonl", [{"input": c, "response": "bb"} for c in "abcdefgh"])
    run = toy_run(sft_data=pairs, sft_steps=30, sft_batch_size=8, sft_lr=1e-2, lr=0.0, eval_temperature=None)
    start = run.metrics[0]
    assert start["step"] == 0 and start["sft/loss"] < 0.5 < start["sft/loss_first"] and start["time/warm_start"] > 0
    responses = [s["response"] for s in run.samples]
    assert responses.count("bb") > 12, responses


def test_several_optimiser_steps_a_rollout(toy_run):
    one = toy_run(steps=1)
    by_count, by_size = toy_run(steps=1, num_steps_per_rollout=4), toy_run(steps=1, global_batch_size=2)
    assert by_count.metrics[0]["train/loss"] == by_size.metrics[0]["train/loss"]
    # the later steps of a rollout have left the policy that sampled it, the only step has not
    assert one.metrics[0]["train/ratio_deviation"] == 0 and by_count.metrics[0]["train/ratio_deviation"] > 0


@pytest.mark.parametrize("estimator", sorted(ALGORITHMS))
@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean", "constant"])
def test_every_estimator_with_every_aggregation(toy_run, estimator, aggregation):
    run = toy_run(steps=1, advantage_estimator=estimator, loss_aggregation=aggregation, num_steps_per_rollout=2)
    assert run.metrics[0]["train/grad_norm"] > 0


def test_normalised_advantages_change_the_gradient(toy_run):
    plain, whitened = toy_run(steps=1, clip_grad=0), toy_run(steps=1, clip_grad=0, normalize_advantages=True)
    assert plain.metrics[0]["reward/mean"] == whitened.metrics[0]["reward/mean"]
    assert plain.metrics[0]["train/grad_norm"] != pytest.approx(whitened.metrics[0]["train/grad_norm"], rel=1e-3)


def test_overlong_responses_lose_reward(toy_run):
    ends = ",".join(map(str, range(2, 16)))  # some responses end early
    options = {"steps": 1, "rollout_max_response_len": 8, "rollout_stop_token_ids": ends, "clip_grad": 0}
    plain, short = toy_run(**options), toy_run(overlong_buffer_len=4, overlong_penalty_factor=5.0, **options)
    # the metric is what the reward function said; the gradient follows the penalty
    assert plain.metrics[0]["reward/mean"] == short.metrics[0]["reward/mean"]
    assert plain.metrics[0]["train/grad_norm"] != pytest.approx(short.metrics[0]["train/grad_norm"], rel=1e-3)


def test_kl_to_the_reference_model(toy_run):
    in_loss = toy_run(steps=3, kl_loss_coef=0.1, kl_loss_type="k3", lr=1e-2)
    kl = values(in_loss, "train/ref_kl")
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-5
    in_reward = toy_run(steps=3, advantage_estimator="reinforce_plus_plus", kl_coef=0.1, lr=1e-2)
    assert values(in_reward, "train/ref_kl")[-1] > 1e-5


def test_a_stronger_kl_holds_the_policy_nearer(toy_run):
    options = {"steps": 8, "rollout_batch_size": 4, "kl_loss_type": "k2"}
    free, held = toy_run(kl_loss_coef=1e-6, **options), toy_run(kl_loss_coef=10.0, **options)
    assert values(held, "train/ref_kl")[-1] < values(free, "train/ref_kl")[-1]


def test_the_split_into_micro_batches_changes_nothing(toy_run):
    shapes = [
        {"micro_batch_size": 8},
        {"micro_batch_size": 3},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 11},
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1000},
    ]
    runs = [toy_run(["tis"], aux_loss_coef=0.01, entropy_coef=0.01, kl_loss_coef=0.1, **shape) for shape in shapes]
    names = [n for n in runs[0].metrics[1] if not n.startswith("time") and "second" not in n]
    for other in runs[1:]:
        for name in names:
            expected = runs[0].metrics[1][name]
            assert other.metrics[1][name] == pytest.approx(expected, rel=2e-3, abs=2e-5), name


@pytest.mark.parametrize(
    "limits", [{"rollout_top_k": 3}, {"rollout_top_p": 0.7}, {"rollout_top_k": 5, "rollout_top_p": 0.9}]
)
def test_truncated_sampling_has_no_mismatch(toy_run, limits):
    run = toy_run(rollout_temperature=0.8, **limits)
    assert max(values(run, "mismatch/abs_log_prob")) < 1e-4


def test_full_vocabulary_log_probs_with_truncated_sampling(toy_run):
    run = toy_run(rollout_top_k=3, full_vocab_logprobs=True)
    assert max(values(run, "mismatch/abs_log_prob")) < 1e-4
    support = toy_run(rollout_top_k=3)
    # the same samples, but another distribution's log-probs: another gradient
    assert run.metrics[0]["reward/mean"] == support.metrics[0]["reward/mean"]
    assert run.metrics[0]["train/grad_norm"] != pytest.approx(support.metrics[0]["train/grad_norm"], rel=1e-3)


def test_temperature_is_part_of_the_trained_distribution(toy_run):
    for temperature in (0.6, 1.7):
        assert max(values(toy_run(rollout_temperature=temperature), "mismatch/abs_log_prob")) < 1e-4


def test_an_entropy_bonus_is_reported_and_raises_the_entropy(toy_run):
    options = {"steps": 4, "rollout_batch_size": 4, "lr": 5e-3}
    weak, strong = toy_run(entropy_coef=1e-9, **options), toy_run(entropy_coef=1.0, **options)
    assert values(strong, "train/entropy")[-1] > values(weak, "train/entropy")[-1] > 0


def test_load_balancing_is_reported(toy_run):
    weak, strong = toy_run(steps=1, aux_loss_coef=0.01), toy_run(steps=1, aux_loss_coef=0.02)
    # Switch Transformer's loss is at least its coefficient, reached when every expert has the same load
    assert values(weak, "train/load_balance")[0] >= 0.01
    assert values(strong, "train/load_balance") == pytest.approx([2 * values(weak, "train/load_balance")[0]], rel=1e-4)


@pytest.mark.parametrize("plugins", [[], ["r3"], ["r3", "tis"]], ids=["bare", "r3", "r3+tis"])
def test_recomputed_activations_change_nothing(toy_run, plugins):
    plain, recomputed = toy_run(plugins), toy_run(plugins, recompute_activations=True)
    for name in ("train/grad_norm", "train/loss", "reward/mean"):
        assert values(recomputed, name) == pytest.approx(values(plain, name), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
def test_other_model_families(toy_run, family):
    run = toy_run(["r3"] if family == "deepseek_v3" else [], family=family)
    assert max(values(run, "mismatch/abs_log_prob")) < 1e-4 and min(values(run, "train/grad_norm")) > 0


WATCH = """
from miles_core.plugin.marker import hookimpl

@hookimpl
def on_batch(run, batch):
    groups = dict(zip(batch.group.tolist(), batch.index.tolist()))
    run.state.setdefault("trained", []).append(sorted(groups))

@hookimpl
def on_sample(run, sample):
    run.state.setdefault("prompts", {})[sample.group_index] = sample.prompt
"""


def test_over_sampling_with_a_filter_gives_unused_prompts_back(toy_run, tmp_path):
    (tmp_path / "keep.py").write_text("def keep(args, samples):\n    return samples[0].prompt not in 'ab'\n")
    (tmp_path / "watch.py").write_text(WATCH)
    run = toy_run(
        [str(tmp_path / "watch.py")],
        steps=3,
        over_sampling_batch_size=6,
        dynamic_sampling_filter_path=tmp_path / "keep.py",
        n_samples_per_prompt=2,
    )
    prompts, steps = run.run.state["prompts"], run.run.state["trained"]
    # six of the eight prompts go out at once and two are used: those left over come first in the next step, so that
    # every prompt the filter passes is trained on once before any is again
    assert [[prompts[group] for group in groups] for groups in steps] == [["c", "d"], ["e", "f"], ["g", "h"]]
    assert values(run, "rollout/samples") == [4, 4, 4]


def test_a_filter_that_refuses_everything_ends_the_run_with_advice(toy_run, tmp_path):
    (tmp_path / "keep.py").write_text("def keep(args, samples):\n    return False\n")
    with pytest.raises(DataError, match="refused all of the last 40 groups; loosen --dynamic-sampling-filter-path"):
        toy_run(dynamic_sampling_filter_path=tmp_path / "keep.py", n_samples_per_prompt=2)


def test_function_and_fixture_are_the_same():
    assert toy_run(steps=1).metrics[0]["step"] == 1
