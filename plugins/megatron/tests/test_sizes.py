"""Sizes that divide, sizes that do not, and those that are suggested instead."""

import itertools
import json
import re
from pathlib import Path
from unittest.mock import ANY

import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_megatron import families
from miles_megatron.sizes import Sizes, candidates, misfits
from miles_testing import plan

#: Configurations of published checkpoints, as far as they decide sizes.
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())

QWEN = families.read(PUBLISHED["QWEN3_235B"])


def needs(architecture=QWEN, **sizes):
    sizes = {"etp": sizes.get("tp", 1), **sizes}
    return [m.needs for m in misfits(Sizes(**sizes), architecture)]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"ranks": 8, "tp": 8, "sequence": True}, "4 heads of keys and values that divide by 8"),
        ({"ranks": 4, "pp": 4}, "94 layers that divide among 4 pipeline stages"),
        ({"ranks": 8, "ep": 3}, "128 experts that divide by 3"),
        ({"ranks": 6, "pp": 4}, "6 ranks that divide by tensor x pipeline x context = 4"),
        ({"ranks": 4, "ep": 8}, "4 ranks that divide by expert x expert-tensor x pipeline = 8"),
        ({"ranks": 2, "tp": 2}, "--sequence-parallel"),
        ({"virtual": 2}, "--pipeline-model-parallel-size above 1"),
        ({"first": 3}, "--pipeline-model-parallel-size above 1"),
    ],
)
def test_what_does_not_divide_is_said(sizes, wanted):
    assert wanted in needs(**sizes)


def test_uneven_stages_can_be_given():
    assert needs(ranks=4, pp=4, first=23, last=23) == []
    assert Sizes(ranks=4, pp=4, first=23, last=23).stages(94) == [23, 24, 24, 23]


def test_dense_models_have_no_experts_to_divide():
    assert needs(families.read(PUBLISHED["QWEN3_8B"]), ranks=2, ep=2) == ["a mixture of experts"]


def test_candidates_divide():
    found = list(candidates(Sizes(ranks=64), QWEN))
    assert len(found) > 20 and not any(list(misfits(c, QWEN)) for c in found)


@pytest.fixture
def checkpoint(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


#: Their engine is elsewhere, so that the memory of the trainer decides.
ELSEWHERE = {"engine": "sglang", "sglang_url": "http://host:30000"}


def refused(checkpoint, config, *facts, **options):
    with pytest.raises(PlanError) as error:
        plan(
            trainer="megatron",
            hf_checkpoint=checkpoint(config),
            facts=["gpu=H200", *facts],
            micro_batch_size=1,
            **options,
        )
    return str(error.value)


def test_the_plan_refuses_sizes_and_says_which_fit(checkpoint):
    text = refused(checkpoint, PUBLISHED["QWEN3_8B"], "megatron.ranks=8", tensor_model_parallel_size=3)
    assert "megatron needs 8 heads of keys and values that divide by 3" in text
    assert "tensor_model_parallel_size may be 1, 2, 4, 8" in text


def test_layers_that_do_not_divide_are_offered_other_first_and_last_stages(checkpoint):
    given = {"pipeline_model_parallel_size": 5, "recompute_granularity": "full", **ELSEWHERE}
    text = refused(checkpoint, PUBLISHED["QWEN3_8B"], "megatron.ranks=5", **given)
    assert "megatron needs 36 layers that divide among 5 pipeline stages" in text
    flags = "--num-layers-in-first-pipeline-stage 6 --num-layers-in-last-pipeline-stage 6"
    assert flags in [line.strip() for line in text.split("would do:\n")[1].splitlines()]
    given |= {"hf_checkpoint": checkpoint(PUBLISHED["QWEN3_8B"]), "micro_batch_size": 1, **typed(flags)}
    accepted = plan(trainer="megatron", facts=["gpu=H200", "megatron.ranks=5"], **given)
    assert "rank of stage 4 (6 layers)" in "\n".join(accepted.reviews)


def typed(flags):
    """Flags of a suggestion, as options."""
    words = flags.split()
    named = {n[2:].replace("-", "_"): v for n, v in itertools.pairwise([*words, "--"]) if n[:2] == "--"}
    return {n: True if v.startswith("--") else v for n, v in named.items()}


@pytest.mark.parametrize(("model", "ranks", "options"), [
    ("DEEPSEEK_V3", 1024, {}), ("QWEN3_235B", 64, {"rollout_batch_size": 128, "use_dynamic_batch_size": True}),
])  # fmt: skip
def test_the_plan_refuses_what_cannot_fit_with_sizes_that_do(checkpoint, model, ranks, options):
    text = refused(checkpoint, PUBLISHED[model], f"megatron.ranks={ranks}", **ELSEWHERE, **options)
    assert re.search(r"the trainer megatron needs \d+ GB on each GPU", text) and "gpu.memory_gb = 151" in text
    offered = text.split("would do:\n")[1].splitlines()
    sizes = next(line for line in offered if "parallel-size" in line and "--fact" not in line)
    accepted = plan(
        trainer="megatron",
        hf_checkpoint=checkpoint(PUBLISHED[model]),
        facts=["gpu=H200", f"megatron.ranks={ranks}"],
        micro_batch_size=1,
        **ELSEWHERE,
        **options,
        **typed(sizes),
    )
    assert f"billion parameters on {ranks} ranks" in "\n".join(accepted.reviews)


def test_ranks_that_are_no_number_are_a_sentence(checkpoint, monkeypatch):
    def said(*facts):
        with pytest.raises(ConfigError) as error:
            plan(trainer="megatron", hf_checkpoint=checkpoint(PUBLISHED["QWEN3_8B"]), facts=facts)
        return str(error.value)

    assert said("megatron.ranks=-8").startswith(
        "--fact megatron.ranks=-8: the number of training ranks is -8; it must be"
    )
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert (
        said() == "environment variable WORLD_SIZE: the number of training ranks is many; it must be a positive integer"
    )


def test_too_few_gpus_for_any_sizes(checkpoint):
    text = refused(checkpoint, PUBLISHED["DEEPSEEK_V3"], "megatron.ranks=8", **ELSEWHERE)
    assert re.search(r"--fact megatron.ranks=\d+ --tensor-model-parallel-size", text)


def test_a_family_that_cannot_be_built_is_refused(checkpoint):
    config = {**PUBLISHED["MIXTRAL_8X7B"], "model_type": "gemma2"}
    assert "it lacks norms after attention" in refused(checkpoint, config, "megatron.ranks=64")


def test_a_format_whose_tiles_reach_over_a_joint_is_refused(checkpoint):
    small = {**PUBLISHED["QWEN3_8B"], "head_dim": 64}
    format = {"plugins": ["fp8"], "fp8_recipe": "blockwise"}
    text = refused(checkpoint, small, "megatron.ranks=8", **format)
    assert "megatron needs heads of a multiple of 128, not 64" in text
    text = refused(checkpoint, PUBLISHED["QWEN3_8B"], "megatron.ranks=64", tensor_model_parallel_size=8, plugins=["int4"],
                   int4_fake_qat=True, int4_group_size=1024)  # fmt: skip
    assert "inner units of a dense layer on a rank that are a multiple of 1024, not 1536" in text


def test_formats_that_the_trainer_does_not_have_are_refused(checkpoint):
    config = PUBLISHED["QWEN3_235B"]
    text = refused(checkpoint, config, "megatron.ranks=256", plugins=["nvfp4"], train_precision="nvfp4",
                   rollout_precision="nvfp4", emulate_precision=True)  # fmt: skip
    assert "train.precision nvfp4 needs the trainer capability format:nvfp4" in text
    assert "format:fp8, format:mxfp8, format:int4" in text
    text = refused(
        checkpoint, config, "megatron.ranks=256", plugins=["mxfp8"], fp8_recipe="mxfp8", emulate_precision=True
    )
    assert "megatron needs a GPU with mxfp8 tensor cores, or no GPU at all" in text
    text = refused(checkpoint, config, "megatron.ranks=256", plugins=["mxfp8"], fp8_recipe="mxfp8")
    assert "needs gpu.sm >= 100" in text


@pytest.mark.parametrize(("config", "notes"), [("QWEN3_235B", 1), ("QWEN3_8B", 0)])
def test_a_plan_says_where_codes_of_experts_differ_from_the_engine_s(checkpoint, config, notes):
    accepted = plan(
        trainer="megatron",
        hf_checkpoint=checkpoint(PUBLISHED[config]),
        facts=["gpu=B200", "megatron.ranks=256", "package.sglang=0.5.17", "gpu.count=8"],
        engine="sglang",
        sglang_tp_size=8,
        fp8_recipe="mxfp8",
        micro_batch_size=1,
        **{"expert_model_parallel_size": 32} if notes else {},
    )
    assert sum("before it rounds them" in text for text in accepted.advice) == notes


@pytest.mark.parametrize(("options", "override"), [({}, "dequantized"), ({"backward_override": "none"}, None)])
def test_a_plan_with_replay_and_fp8_on_both_sides(checkpoint, options, override):
    accepted = plan(
        trainer="megatron",
        hf_checkpoint=checkpoint(PUBLISHED["QWEN3_235B"]),
        facts=["gpu=H200", "megatron.ranks=256", "package.sglang=0.5.17", "gpu.count=8"],
        engine="sglang",
        sglang_tp_size=8,
        sglang_ep_size=8,
        plugins=["r3", "fp8"],
        fp8_recipe="blockwise",
        expert_model_parallel_size=32,
        micro_batch_size=1,
        **options,
    )
    assert accepted.fact("env.NVTE_FP8_BLOCK_SCALING_FP32_SCALES") == "1"
    assert accepted.fact("env.NVTE_BACKWARD_OVERRIDE") == override
    assert accepted.fact("env.CUDA_DEVICE_MAX_CONNECTIONS") is None, "no tensor or context parallelism"
    assert [text for text in accepted.advice if "quantises gradients too" in text] == [ANY] * len(options)


@pytest.mark.parametrize(("gpu", "tp", "value"), [("H200", 2, "1"), ("H200", 1, None), ("B200", 2, None)])
def test_one_hardware_queue_where_communication_overlaps(checkpoint, gpu, tp, value):
    accepted = plan(
        trainer="megatron",
        hf_checkpoint=checkpoint(PUBLISHED["QWEN3_8B"]),
        facts=[f"gpu={gpu}", "megatron.ranks=8", "gpu.count=8"],
        tensor_model_parallel_size=tp,
    )
    assert accepted.fact("env.CUDA_DEVICE_MAX_CONNECTIONS") == value


@pytest.mark.parametrize(("tp", "notes"), [(1, 1), (2, 0)])
def test_sequence_parallelism_without_tensor_parallelism_has_no_effect(checkpoint, tp, notes):
    accepted = plan(
        trainer="megatron",
        hf_checkpoint=checkpoint(PUBLISHED["QWEN3_8B"]),
        facts=["gpu=H200", "megatron.ranks=8", "gpu.count=8"],
        tensor_model_parallel_size=tp,
        sequence_parallel=True,
        use_dynamic_batch_size=True,
        **ELSEWHERE,
    )
    assert len([text for text in accepted.advice if "--sequence-parallel has no effect" in text]) == notes


def test_gradients_are_quantised_in_a_number_format_alone(checkpoint):
    text = refused(checkpoint, PUBLISHED["QWEN3_8B"], "megatron.ranks=8", backward_override="none")
    assert "megatron needs train.precision in {fp8, mxfp8}" in text


def test_the_embedding_and_the_output_layer_may_count_as_layers():
    """As Megatron-Core's ``account_for_*_in_pipeline_split``: 94 layers and two more in 8 x 6 chunks of two."""
    sizes = Sizes(ranks=16, tp=2, pp=8, virtual=6, sequence=True, embedding=True, loss=True)
    assert sizes.stages(94) == [11, *[12] * 6, 11]
    assert Sizes(pp=4, embedding=True).stages(11) == [2, 3, 3, 3] and Sizes(pp=4, loss=True).stages(11) == [3, 3, 3, 2]
    assert "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split" in sizes.flags()
