"""Whole simulations: core's loop on a virtual clock."""

from __future__ import annotations

import gzip
import json

import pytest

from miles_core.errors import MilesError
from miles_planner.simulation.command import run
from miles_planner.simulation.simulation import simulate

#: One engine decodes 8 requests of 100 tokens in 1 s, the trainer needs 0.5 s per step, a sync 0.25 s.
FLAGS = {
    "--rollout-batch-size": 4,
    "--n-samples-per-prompt": 2,
    "--rollout-max-response-len": 1000,
    "--num-rollout": 8,
    "--lengths": "constant:100",
    "--prompt-lengths": "constant:25",
    "--train-seconds-per-token": 0.5 / (8 * 125),
    "--sync-seconds": 0.25,
    "--prefill-seconds-per-token": 0,
    "--engine-gpus": 1,
    "--trainer-gpus": 1,
}


@pytest.fixture
def words(tmp_path):
    curve = tmp_path / "curve.json"
    curve.write_text(json.dumps({"batches": [1, 64], "seconds": [0.01, 0.01]}))

    def make(*more, **changed):
        values = FLAGS | {"--decode-curve": curve} | {"--" + k.replace("_", "-"): v for k, v in changed.items()}
        return [str(word) for pair in values.items() for word in pair] + list(more)

    return make


def test_sync_takes_the_sum_and_ahead_the_longest(words):
    sync = simulate(words()).summary()
    assert sync["seconds_per_step"] == pytest.approx(1 + 0.5 + 0.25, rel=1e-3)
    assert sync["engine_busy"] == pytest.approx(1 / 1.75, rel=1e-3)
    assert sync["trainer_busy"] == pytest.approx(0.5 / 1.75, rel=1e-3)
    assert sync["tokens_per_second"] == pytest.approx(800 / 1.75, rel=1e-3)
    assert sync["running"] == pytest.approx(8 / 1.75, rel=1e-3) and sync["length_mean"] == 100
    assert sync["staleness_max"] == 0 and sync["tokens_generated_per_trained"] == pytest.approx(1, rel=1e-3)
    ahead = simulate(words(schedule="ahead")).summary()
    assert ahead["seconds_per_step"] == pytest.approx(1.25, rel=1e-3)
    assert ahead["staleness_mean"] == ahead["staleness_max"] == ahead["stale_tokens"] == 1


def test_shared_gpus_pay_for_their_turns(words):
    apart = simulate(words()).summary()["seconds_per_step"]
    shared = simulate(words("--colocate", switch_seconds=3)).summary()
    assert shared["seconds_per_step"] == pytest.approx(apart + 4 * 3, rel=1e-2)
    assert shared["gpu_busy"] == pytest.approx(1.5 / shared["seconds_per_step"], rel=1e-2)


def test_async_with_long_tails_keeps_engines_busy_and_its_bound(words):
    tail = {"lengths": "lognormal:60,1.0", "num_rollout": 30, "warm_up_steps": 4}
    sync, ahead = (simulate(words(schedule=name, **tail)).summary() for name in ("sync", "ahead"))
    kept, trained = (
        simulate(words(schedule="async", max_weight_staleness=3, stale_samples=stale, **tail)).summary()
        for stale in ("drop", "train")
    )
    assert trained["seconds_per_step"] < ahead["seconds_per_step"] < sync["seconds_per_step"]
    assert trained["running"] > sync["running"] and trained["staleness_max"] > 3
    assert kept["staleness_max"] <= 3 and kept["dropped_groups"] > 0
    assert kept["tokens_generated_per_trained"] > trained["tokens_generated_per_trained"]
    assert simulate(words(schedule="sync", **tail)).summary() == sync  # the same numbers every time


def test_failed_engines_are_replaced_and_their_requests_sent_again(words):
    cluster = {"engine_gpus": 4, "lengths": "lognormal:200,1.0", "num_rollout": 12}
    whole = simulate(words(**cluster)).summary()
    failing = simulate(words(**cluster, engine_failure_hours=15 / 3600, engine_restart_seconds=2)).summary()
    assert whole["failures"] == 0 < failing["failures"]
    assert failing["seconds_per_step"] > whole["seconds_per_step"]
    assert failing["length_mean"] == whole["length_mean"]  # the same samples
    assert failing["tokens_generated_per_trained"] > 1.001  # what failed engines had generated


def test_thousands_of_engines(words):
    found = simulate(words(engine_gpus=4096, rollout_batch_size=128, num_rollout=2)).summary()
    assert found["seconds_per_step"] == pytest.approx(1 + 16 + 0.25, rel=1e-2)
    assert found["running"] * 4096 == pytest.approx(256 / found["seconds_per_step"], rel=1e-2)


def test_lengths_of_a_run(words, tmp_path):
    rows = [{"tokens": [0] * (5 + n), "response_length": n} for n in (20, 60)]
    (tmp_path / "rollouts" / "train").mkdir(parents=True)
    with gzip.open(tmp_path / "rollouts" / "train" / "00000001.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    run_of = f"run:{tmp_path}"
    setup = simulate(words(lengths=run_of, prompt_lengths=run_of, rollout_batch_size=16, num_rollout=3)).setup
    assert {setup.lengths.response(n) for n in range(50)} == {20, 60}
    assert {setup.lengths.prompt(n) for n in range(50)} == {5}


def test_lengths_in_the_order_of_a_run(words, tmp_path):
    saved = tmp_path / "rollouts" / "train"
    saved.mkdir(parents=True)
    for step, numbers in ((1, (2, 0, 3, 1)), (2, (5, 4, 7, 6))):  # saved in the order of completion
        rows = [
            {"tokens": [0] * (10 + n // 2 + 10 * n + 1), "response_length": 10 * n + 1, "index": n, "group": n // 2}
            for n in numbers
        ]
        with gzip.open(saved / f"{step:08d}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    run_of = f"replay:{tmp_path}"
    setup = simulate(words(lengths=run_of, prompt_lengths=run_of, rollout_batch_size=16, num_rollout=3)).setup
    assert [setup.lengths.response(n) for n in range(10)] == [1, 11, 21, 31, 41, 51, 61, 71, 1, 11]
    assert [setup.lengths.prompt(n) for n in range(5)] == [10, 11, 12, 13, 10]


def test_the_command_compares_and_draws(words, tmp_path, capsys):
    plot, few = tmp_path / "plot.png", words(num_rollout=3, engine_gpus=2)
    compare = ["--compare", "sync,async --no-partial-rollout", "--splits", "2+1"]
    assert run([*few, *compare, "--plot", str(plot)]) == 0
    table = capsys.readouterr().out.splitlines()
    at = table.index("") + 1
    assert [line.split("  ")[0] for line in table[at + 1 : at + 3]] == ["sync 2+1", "async --no-partial-rollout 2+1"]
    assumed = "\n".join(table[:at])
    assert "responses constant:100 (given), at most 1,000 tokens; prompts constant:25 (given)" in assumed
    assert "10.0 ms per step with one request" in assumed and f"(measured, {tmp_path / 'curve.json'})" in assumed
    assert "weight sync 0.2 s (given)" in assumed
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert run([*few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["simulated"]
    assert len(found) == 1 and len(found[0]["steps"]) == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": "gamma:3"}, "--lengths gamma:3: it is none of constant:N"),
        ({"lengths": "uniform:9,3"}, "HIGH is below LOW"),
        ({"lengths": "run:/nowhere"}, "/nowhere"),
        ({"engine_gpus": 3, "engine_size": 2}, "--engine-gpus 3 is not a multiple of --engine-size 2"),
        ({"num_rollout": 1}, "--num-rollout 1 leaves no step after --warm-up-steps 1"),
        ({"decode_curve": "/nowhere.json"}, "--decode-curve /nowhere.json"),
        ({"model_config": "/nowhere"}, "--model-config /nowhere"),
        ({"gpu": "Z9", "parameters": 1e9}, "--gpu Z9: its rates are unknown; choose one of A100"),
        ({"parameters": 1e12}, "its weights need 2000 GB; raise --engine-size"),
        ({"splits": "3"}, "--splits 3: write GPUs of engines"),
        ({"splits": "1+1,48+99"}, "--splits 48+99: this is 147 GPUs, but --engine-gpus 1 and --trainer-gpus 1 are 2;"),
        ({"compare": "sync,,async"}, "--compare 'sync,,async': an entry is empty"),
        ({"cache_tokens": 999}, "--cache-tokens 999: the cache of an engine holds 999 tokens, and a response may have"),
        ({"parameters": 1e9, "cache_tokens": 9}, "--cache-tokens 9: the cache of an engine holds 9 tokens"),
        (
            {"engine_failure_hours": 1e-9},
            "an engine that fails every 3.6e-06 s makes no progress, because it takes 300 s",
        ),
        (
            {"engine_failure_hours": 5 / 3600, "engine_restart_seconds": 0},
            "every 5 s makes no progress, because it takes 0 s to replace (--engine-restart-seconds) and the longest response takes 10 s",
        ),
    ],
)
def test_mistakes_are_explained(words, changed, message):
    with pytest.raises(MilesError) as caught:
        run(words(**changed))
    assert message in str(caught.value)


def test_speeds_from_peak_rates_are_shown_as_computed(words, capsys):
    given = words("--parameters", "8e9", "--gpu", "h200", num_rollout=3)
    del given[given.index("--decode-curve") : given.index("--decode-curve") + 2]
    assert run(given) == 0
    assert "(computed from the peak rates of H200); cache" in capsys.readouterr().out


def test_shared_engines_have_the_gpus_of_the_trainer(words):
    given = words("--colocate")
    given[given.index("--engine-gpus") + 1] = "64"
    with pytest.raises(MilesError, match="--engine-gpus 64: with --colocate engines run on the"):
        simulate(given)
