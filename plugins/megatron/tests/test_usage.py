"""Memory of Megatron runs in the plan: what is refused, and options that would do."""

import re
import shutil
from pathlib import Path

import pytest

from miles_core.plugin import PlanError
from miles_testing import plan

PUBLISHED = Path(__file__).parents[3] / "tests" / "published"

#: slime's one-node recipe, as far as it decides memory.
SLIME = {
    "runtime": "ray", "engine": "sglang", "trainer": "megatron", "colocate": True, "actor_num_gpus_per_node": 8,
    "tensor_model_parallel_size": 4, "sequence_parallel": True, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1,
    "recompute_granularity": "full", "use_dynamic_batch_size": True, "max_tokens_per_gpu": 20480,
    "rollout_num_gpus_per_engine": 8, "sglang_mem_fraction_static": 0.7, "rollout_max_response_len": 8192,
    "rollout_batch_size": 32, "n_samples_per_prompt": 8,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    def write(name):
        shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
        return str(tmp_path)

    return write


def table(accepted):
    return next(note for note in accepted.reviews if note.startswith("memory of a GPU"))


def row(accepted, start):
    """Column -> GB of a process in the table of an accepted plan."""
    lines = table(accepted).splitlines()
    names = ["process", *re.split(r"\s{2,}", lines[1].strip())[1:]]
    line = next(line for line in lines if line.strip().startswith(start))
    return dict(zip(names[1:], map(float, re.split(r"\s{2,}", line.strip())[1:]), strict=True))


def test_the_switch_alone_offloads_all_of_the_optimizer(checkpoint):
    model = checkpoint("qwen3-30b-a3b")
    aware = {"use_precision_aware_optimizer": True}
    off, half, on, kept = (
        plan(hf_checkpoint=model, facts=["hardware=8xH200"], **SLIME, **more)
        for more in (
            {"optimizer_cpu_offload": True, **aware},
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, **aware},
            {},
            {"optimizer_cpu_offload": True},
        )
    )
    assert row(on, "trainer")["optimizer"] == pytest.approx(2 * row(half, "trainer")["optimizer"], rel=0.01)
    assert row(off, "trainer")["in all"] == pytest.approx(
        row(on, "trainer")["in all"] - row(on, "trainer")["optimizer"], abs=0.2
    )
    assert "100% of the optimizer's state is in host memory" in table(off)
    # 4 of 12 bytes per parameter: Megatron-Core's copy of the FP32 masters on the GPU
    assert row(kept, "trainer")["optimizer"] == pytest.approx(row(on, "trainer")["optimizer"] / 3, rel=0.01)


def test_what_does_not_fit_is_offered_offload_fractions(checkpoint):
    small = ["hardware=8xH100", "gpu.memory_gb=80"]
    given = {"hf_checkpoint": checkpoint("qwen3-30b-a3b"), "facts": small, **SLIME}
    with pytest.raises(PlanError) as error:
        plan(**given)
    text = str(error.value)
    assert "the trainer megatron and the engine sglang need" in text and "gpu.memory_gb = 80" in text
    found = re.search(
        r"--optimizer-cpu-offload --optimizer-offload-fraction (\S+) --use-precision-aware-optimizer", text
    )
    fraction = float(found[1])
    offload = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
    accepted = plan(**given, **offload, optimizer_offload_fraction=fraction)
    assert f"{fraction:.0%} of the optimizer's state" in table(accepted)


def test_experts_that_do_not_divide_name_every_size_and_the_fix(checkpoint):
    given = {**SLIME, "optimizer_cpu_offload": True}
    del given["expert_tensor_parallel_size"]
    with pytest.raises(PlanError) as error:
        plan(hf_checkpoint=checkpoint("qwen3-30b-a3b"), facts=["hardware=8xH100"], **given)
    text = str(error.value)
    assert "8 ranks that divide by expert x expert-tensor x pipeline = 32" in text
    assert "megatron.expert_model_parallel_size = 8" in text
    assert re.search(r"megatron.expert_tensor_parallel_size = 4 +the value of tensor_model_parallel_size", text)
    assert "--expert-tensor-parallel-size 1" in text


def test_too_few_machines_are_answered_with_how_many_would_do(checkpoint):
    given = {
        "hf_checkpoint": checkpoint("qwen3-235b-a22b"),
        "trainer": "megatron",
        "runtime": "ray",
        "engine": "sglang",
    }
    given |= {"actor_num_gpus_per_node": 8, "rollout_num_gpus_per_engine": 8, "micro_batch_size": 1}
    with pytest.raises(PlanError) as error:
        plan(**given, facts=["hardware=2x8xH200"])
    offered = re.findall(r"on (\d+) machines: --actor-num-nodes (\d+) (--.*)", str(error.value))
    for machines, nodes, flags in offered:
        words = re.findall(r"--([a-z-]+)(?: (full|\d+))?", flags)
        options = {name.replace("-", "_"): value or True for name, value in words}
        plan(**given, **options, actor_num_nodes=int(nodes), facts=[f"hardware={machines}x8xH200"])
        assert int(machines) == int(nodes) + (0 if "--colocate" in flags else 1)
    # first fewer machines with everything that saves memory, then those that suffice without
    assert "--optimizer-cpu-offload" in offered[0][2] and "--optimizer-cpu-offload" not in offered[-1][2]
    assert int(offered[0][0]) < int(offered[-1][0])


def test_tensor_parallelism_over_several_machines_gets_a_warning(checkpoint):
    given = {
        "trainer": "megatron",
        "hf_checkpoint": checkpoint("deepseek-v3"),
        "sequence_parallel": True,
        "optimizer_cpu_offload": True,
    }
    given |= {
        "expert_model_parallel_size": 128,
        "expert_tensor_parallel_size": 1,
        "recompute_granularity": "full",
        "micro_batch_size": 1,
    }
    given |= {"engine": "sglang", "sglang_url": "http://host:30000"}
    facts = ["hardware=64x8xH200", "megatron.ranks=512"]
    for size, warned in ((8, 0), (16, 1)):
        accepted = plan(**given, facts=facts, tensor_model_parallel_size=size)
        assert (
            sum(f"--tensor-model-parallel-size {size} are on several machines of 8" in n for n in accepted.reviews)
            == warned
        )


def test_packages_are_assumed_where_the_plan_is_for_other_machines(checkpoint):
    given = {
        "hf_checkpoint": checkpoint("qwen3-4b"),
        "trainer": "megatron",
        "micro_batch_size": 1,
        "recompute_granularity": "full",
    }
    accepted = plan(**given, facts=["hardware=8xH200", "megatron.ranks=8", "package.megatron-core=assumed"])
    assert accepted.fact("package.transformer-engine") in ("assumed", "2.20.2")
    with pytest.raises(
        PlanError, match=r"megatron needs megatron-core >=0.19.2(.|\n)*--fact package.megatron-core=none"
    ):
        plan(**given, facts=["hardware=8xH200", "megatron.ranks=8", "package.megatron-core=none"])


def test_adapters_have_gradients_and_states_and_the_base_has_none(checkpoint):
    given = {"hf_checkpoint": checkpoint("qwen3-30b-a3b"), "facts": ["hardware=8xH200"], **SLIME}
    full, adapters = (row(plan(plugins, **given), "trainer") for plugins in ([], ["lora"]))
    for name in ("gradients", "optimizer"):
        assert adapters[name] == pytest.approx(0.05 * full[name], abs=0.06)
    assert adapters["weights"] == pytest.approx(1.05 * full["weights"], rel=0.02)
    kept = row(
        plan(["lora"], **{**given, "recompute_granularity": None, "max_tokens_per_gpu": 8192}), "trainer"
    )  # base plus adapter of the layers
    assert kept["weights"] == pytest.approx(2.05 * full["weights"], rel=0.02)


def test_sizes_that_divide_but_do_not_fit_are_offered_with_what_makes_them_fit(checkpoint):
    given = {name: value for name, value in SLIME.items() if name != "expert_tensor_parallel_size"}
    given |= {"hf_checkpoint": checkpoint("qwen3-30b-a3b"), "facts": ["hardware=8xH200"]}
    given |= {"recompute_granularity": None, "max_tokens_per_gpu": 60000}
    with pytest.raises(PlanError) as error:
        plan(**given)
    fixes = [line.strip() for line in str(error.value).partition("would do:")[2].splitlines() if line.strip()]
    offload = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer"
    assert f"--expert-tensor-parallel-size 1 {offload}" in fixes
    assert all(fix.count("--expert-model-parallel-size") < 2 for fix in fixes)  # no change is taken back by the next
    half = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "use_precision_aware_optimizer": True}
    plan(**given | {"expert_tensor_parallel_size": 1} | half)
