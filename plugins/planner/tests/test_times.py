"""The estimates of seconds, without a search."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.plugin import ConfigError
from miles_planner.layout import EngineLayout, TrainerLayout
from miles_planner.model_cost import model_cost
from miles_planner.rates import known_gpus, rates_of
from miles_planner.rollout_time import decode_step_seconds, rollout_time, running_sequences
from miles_planner.step_time import step_time, sync_seconds
from miles_planner.training_time import stage_seconds, training_time
from miles_planner.workload import Workload, response_lengths

ROOT, BUCKETS = Path(__file__).parents[3], "buckets"
H200 = rates_of("H200")


def cost(name):
    found = model_cost(json.loads((ROOT / f"tests/published/{name}.json").read_text(encoding="utf-8")))
    assert found is not None
    return found


QWEN, MOE, DEEPSEEK = cost("qwen3-32b"), cost("qwen3-235b-a22b"), cost("deepseek-v3")
ENGINE = EngineLayout(8, tp=8, slots=256, cache=1 << 20, weights=65.5e9 / 8, token_bytes=262144 / 8)
WORK = Workload(1024, 512, 2048, 8192)


def test_every_efficiency_is_within_the_range_of_its_source():
    table = tomllib.loads((ROOT / "plugins/planner/miles_planner/rates.toml").read_text(encoding="utf-8"))
    for kind in ("efficiency", "seconds"):
        for name, entry in table[kind].items():
            assert entry["range"][0] <= entry["value"] <= entry["range"][1], name
            assert entry["source"] and entry["unit"], name
    measured = [
        e for kind in ("efficiency", "seconds") for e in table[kind].values() if "benchmarks/results" in e["source"]
    ]
    for entry in measured:
        name = entry["source"].partition("benchmarks/results/")[2].partition(".json")[0]
        assert (ROOT / f"benchmarks/results/{name}.json").exists(), name


def test_an_unknown_gpu_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"no rates for the GPU T1000.*H200"):
        rates_of("T1000")
    assert {"H100", "H200", "B200", "GB200", "H20", "A100"} <= set(known_gpus())


@pytest.mark.parametrize(
    ("model", "active"), [("qwen3-235b-a22b", 22e9), ("deepseek-v3", 37e9), ("qwen3-30b-a3b", 3.0e9)]
)
def test_active_parameters_are_those_of_the_models_names(model, active):
    assert cost(model).active == pytest.approx(active, rel=0.07)


def test_a_batch_touches_all_experts_and_one_token_only_its_own():
    assert DEEPSEEK.touched(1) == pytest.approx(DEEPSEEK.active, rel=0.05)
    assert DEEPSEEK.touched(1e6) == pytest.approx(DEEPSEEK.size.parameters - 129280 * 7168, rel=1e-6)


@pytest.mark.parametrize("mean", [100.0, 2000.0, 5700.0, 8150.0])
def test_lengths_have_their_mean_and_never_exceed_the_limit(mean):
    lengths = response_lengths(mean, 8192, 256)
    assert sum(lengths) / 256 == pytest.approx(mean, rel=0.01)
    assert max(lengths) <= 8192 and list(lengths) == sorted(lengths)


def test_a_decoding_step_at_a_small_batch_reads_the_weights():
    step = decode_step_seconds(H200, QWEN, ENGINE, 1, 1)
    read = QWEN.touched(1) * 2 / 8 / (4.8e12 * 0.63)
    assert step == pytest.approx(read + 0.0025 + 64 * 15e-6, rel=0.01)
    assert decode_step_seconds(H200, QWEN, ENGINE, 256, 4096) > 2 * step


def test_a_measured_decoding_rate_is_reproduced():
    """miles, Qwen3.8-27B in BF16 on one H200 (recipes.json): 1,855 tokens/s with 39 requests; a dense model of that size here."""
    weights = QWEN.size.parameters * 2.0 * 27 / 32.8
    share = replace(ENGINE, tp=1, weights=weights, token_bytes=65536.0)
    assert 39 / decode_step_seconds(H200, QWEN, share, 39, 4096) == pytest.approx(1855, rel=0.25)


def test_only_layers_that_attend_take_time_for_attention():
    """Three of four layers without attention (Qwen3-Next), or half of them with a window (gpt-oss)."""
    plain = json.loads((ROOT / "tests/published/qwen3-32b.json").read_text(encoding="utf-8"))
    hybrid = model_cost(
        plain | {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_value_heads": 64}
    )
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 32, "sliding_window": 128}
    windowed = model_cost(plain | windows)
    assert QWEN.attending(4096) == 64 and hybrid.attending(4096) == 16
    assert windowed.attending(4096) == 32 + 32 * 128 / 4096 and windowed.attending(64) == 64
    layout = TrainerLayout(8, tp=8, stage_layers=64, tokens=32768)
    short, long = (stage_seconds(H200, QWEN, layout, 32768, tokens) for tokens in (1, 32768))
    attended = stage_seconds(H200, windowed, layout, 32768, 32768) - stage_seconds(H200, windowed, layout, 32768, 1)
    assert attended == pytest.approx((long - short) * windowed.attending(16384) / 64, rel=0.01)
    full, half = (decode_step_seconds(H200, of, ENGINE, 256, 8192) for of in (QWEN, windowed))
    cache = 256 * 8192 * ENGINE.token_bytes / (4.8e12 * 0.63)
    assert full - half == pytest.approx(cache * (1 - windowed.attending(8192) / 64), rel=0.01)


def test_states_are_read_and_written_in_every_decoding_step():
    stateful = replace(ENGINE, state_bytes=20e6)
    steps = [decode_step_seconds(H200, QWEN, engine, 256, 4096) for engine in (ENGINE, stateful)]
    assert steps[1] - steps[0] == pytest.approx(256 * 2 * 20e6 / (4.8e12 * 0.63), rel=0.01)
    small = replace(stateful, cache=20_000)
    assert running_sequences(small, WORK) == int(
        20_000 * ENGINE.token_bytes / ((512 + 0.6 * 2048) * ENGINE.token_bytes + 20e6)
    )


def test_a_draining_rollout_is_slower_than_the_full_batch_and_a_continuous_one_is_not():
    drained, continuous = (
        rollout_time(H200, QWEN, ENGINE, WORK),
        rollout_time(H200, QWEN, ENGINE, WORK, continuous=True),
    )
    assert continuous.seconds < drained.seconds
    assert drained.tokens_per_second < 0.7 * drained.full_rate
    longest = 8192 * decode_step_seconds(H200, QWEN, ENGINE, 1, 1)
    assert drained.seconds > 0.9 * longest


def test_a_small_cache_limits_the_sequences_that_run():
    small = replace(ENGINE, cache=20_000)
    assert running_sequences(small, WORK) == int(20_000 / (512 + 0.6 * 2048))
    assert rollout_time(H200, QWEN, small, WORK).seconds > 2 * rollout_time(H200, QWEN, ENGINE, WORK).seconds


def test_a_pipeline_adds_its_bubble():
    one = TrainerLayout(64, tp=8, stage_layers=64, tokens=8192)
    deep = replace(one, pp=8, stage_layers=8)
    few = Workload(64, 1024, 3072, 4096)
    batches, stage = math.ceil(64 * 4096 / 8192), stage_seconds(H200, QWEN, deep, 8192, 4096)
    assert training_time(H200, QWEN, deep, few).passes == pytest.approx((batches + 7) * stage * 3)
    half = replace(deep, virtual=2)
    assert training_time(H200, QWEN, half, few).passes == pytest.approx((batches + 3.5) * stage * 3)


def test_what_costs_time_in_training():
    base = TrainerLayout(64, tp=4, ep=8, stage_layers=94, tokens=8192)
    seconds = training_time(H200, MOE, base, WORK).seconds
    assert training_time(H200, MOE, replace(base, recompute=1.0), WORK).passes == pytest.approx(
        training_time(H200, MOE, base, WORK).passes * 4 / 3
    )
    assert (
        training_time(H200, MOE, replace(base, offloaded=1.0), WORK).optimizer
        > 2 * training_time(H200, MOE, base, WORK).optimizer
    )
    assert training_time(H200, MOE, base, replace(WORK, extra_forwards=1)).extra > 0.2 * seconds
    assert training_time(H200, MOE, replace(base, ep=64), WORK).seconds > seconds  # over the network
    assert training_time(H200, MOE, base, WORK, colocated=True).moved > 0


@pytest.mark.parametrize(("result", "layers"), [("dense_5b", 32)])
def test_training_uses_the_measured_share_of_the_peak(result, layers):
    table = json.loads((ROOT / "benchmarks/results/megatron_step-2026-11-22.json").read_text(encoding="utf-8"))
    measured = next(row["share_of_bf16_peak"] for row in table["rows"] if row["model"] == result)
    layout = TrainerLayout(1, stage_layers=QWEN.size.layers, tokens=8192)
    assert training_time(H200, QWEN, layout, Workload(8, 0, 4096, 4096)).used == pytest.approx(measured, rel=0.25)


def test_phases_take_turns_or_run_at_the_same_time():
    generated = rollout_time(H200, QWEN, ENGINE, WORK)
    trained = training_time(H200, QWEN, TrainerLayout(64, tp=8, stage_layers=64), WORK)
    both = step_time(H200, generated, trained, ENGINE, replace(WORK, lag=1), colocated=False, transport=BUCKETS)
    turns = step_time(H200, generated, trained, ENGINE, WORK, colocated=False, transport=BUCKETS)
    rest = sync_seconds(H200, ENGINE, False, BUCKETS) + both.other
    assert both.seconds == pytest.approx(max(generated.seconds, trained.seconds) + rest)
    assert turns.seconds == pytest.approx(generated.seconds + trained.seconds + rest)


#: Results with the transport ``copy``, which ``copy_rate`` of ``rates.toml`` comes from.
COPIES = ["cluster_run-2026-11-27-1b-sync-blocks.json"]


@pytest.mark.parametrize("name", COPIES)
def test_a_sync_by_the_plain_copy_takes_as_long_as_measured(name):
    medians = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))["medians"]
    engine = replace(ENGINE, weights=medians["sync/bytes"] / ENGINE.gpus)
    speed = medians["sync/gb_per_second"] * 1e9
    assert sync_seconds(H200, engine, False, "copy") == pytest.approx(medians["sync/bytes"] / speed, rel=0.1)
    assert sync_seconds(H200, engine, False, BUCKETS) < 1


def test_the_last_stage_of_a_pipeline_computes_the_output_layer():
    even = TrainerLayout(8, pp=8, stage_layers=8, last_layers=8)
    shorter = replace(even, last_layers=4)
    slow, fast = (stage_seconds(H200, QWEN, layout, 8192, 4096) for layout in (even, shorter))
    whole = stage_seconds(H200, QWEN, replace(even, last_layers=0), 8192, 4096)
    assert slow == pytest.approx(whole) and fast < slow, "a shorter last stage leaves time for the output layer"


def test_launches_take_longer_on_grace():
    assert rates_of("GB200").gpu.launch > 1 == rates_of("B200").gpu.launch
    layout, few = TrainerLayout(8, ep=8, stage_layers=94), 512
    slow, fast = (
        stage_seconds(replace(H200, gpu=replace(H200.gpu, launch=x)), MOE, layout, few, few) for x in (2.0, 1.0)
    )
    assert slow > 1.5 * fast
