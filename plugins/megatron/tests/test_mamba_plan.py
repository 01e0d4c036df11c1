"""Plans of models with Mamba-2: kernels that a GPU needs, sizes that do not divide, memory, and entries that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.plugin import CheckpointError, PlanError
from miles_megatron import count, families
from miles_megatron.architecture import Kind
from miles_megatron.config_keys import find_foreign
from miles_megatron.families import MAMBA
from miles_megatron.memory import Work, layer_elements, memory
from miles_megatron.recipes import cuts
from miles_megatron.sizes import Sizes, misfits
from miles_testing import plan

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
NANO = families.read(PUBLISHED["NEMOTRON_3_NANO"])


@pytest.mark.parametrize("chosen", MAMBA)
@pytest.mark.parametrize(
    ("versions", "missing"),
    [
        (("2.2.5", "1.5.0"), ()),
        (("none", "none"), ("mamba-ssm", "causal-conv1d")),
        (("1.2.0", "1.5.0"), ("mamba-ssm",)),
    ],
)
def test_a_gpu_needs_the_kernels(checkpoints, chosen, versions, missing):
    packages = (
        "megatron-core=0.19.2",
        "transformer-engine=2.20.2",
        f"mamba-ssm={versions[0]}",
        f"causal-conv1d={versions[1]}",
    )
    facts = ["gpu.sm=90", "gpu.count=1", "gpu.memory_gb=80", *(f"package.{package}" for package in packages)]
    given = {"trainer": "megatron", "hf_checkpoint": checkpoints(chosen), "facts": facts}
    if not missing:
        assert not any("mamba-ssm" in text for text in plan(**given).advice)
        return
    with pytest.raises(PlanError) as error:
        plan(**given)
    for name in ("mamba-ssm", "causal-conv1d"):
        assert (f'pip install --no-build-isolation "{name}>=' in str(error.value)) == (name in missing)


def test_a_machine_without_a_gpu_and_other_models_need_no_kernels(checkpoints):
    for chosen, gpu in (
        ("nemotron_h", ["gpu.sm=0", "gpu.count=0"]),
        ("qwen3", ["gpu.sm=90", "gpu.count=1", "gpu.memory_gb=80"]),
    ):
        packages = ["package.megatron-core=0.19.2", "package.transformer-engine=2.20.2", "package.mamba-ssm=none"]
        plan(trainer="megatron", hf_checkpoint=checkpoints(chosen), facts=[*gpu, *packages])


def test_heads_and_their_groups_divide_by_ranks():
    def needs(a, **sizes):
        return [found.needs for found in misfits(Sizes(**{"etp": sizes.get("tp", 1), "sequence": True, **sizes}), a)]

    assert not needs(NANO, ranks=2, tp=2) and not needs(NANO, ranks=8, cp=8) and not needs(NANO, ranks=16, cp=16)
    assert needs(replace(NANO, kv_heads=32), ranks=16, tp=16) == [
        "8 groups of heads of Mamba-2 that divide by tensor = 16"
    ]
    assert "64 heads of Mamba-2 that divide by tensor x context = 128" in needs(NANO, ranks=128, cp=128)
    three = replace(NANO, mamba=replace(NANO.mamba, groups=4, heads=24))
    [found] = needs(three, ranks=3, cp=3)
    assert found == "a context-parallel size that divides 4 groups of heads of Mamba-2, or is a multiple of them"


def test_layers_have_the_memory_of_their_kind():
    work = Work(tokens=1024, micro_batches=1)
    stages = memory(NANO, Sizes(52, pp=52), work)
    kinds = {"M": Kind("mamba", False, False), "*": Kind("attention", False, False), "E": Kind("none", True, True)}
    sizes = {letter: count.layer(NANO, kind).total for letter, kind in kinds.items()}
    assert len(set(sizes.values())) == 3
    for stage, letter in list(zip(stages, PUBLISHED["NEMOTRON_3_NANO"]["hybrid_override_pattern"], strict=True))[1:-1]:
        assert stage.weights == 2 * sizes[letter]
    [whole] = memory(NANO, Sizes(), work)
    assert whole.weights == 2 * count.model(NANO).total
    # the input and the output of the norm; output of the first projection; gated output before and after its norm, and after the kernel
    inner, hidden = 64 * 64, 2688
    assert layer_elements(NANO, Sizes(), kinds["M"]) == 2 * hidden + (2 * inner + 2 * 8 * 128 + 64) + 3 * inner
    two = Sizes(2, tp=2, etp=2, sequence=True)
    assert layer_elements(NANO, two, kinds["M"]) == layer_elements(NANO, Sizes(), kinds["M"]) / 2


def test_tiles_of_rows_must_fit_into_the_joined_projection():
    assert "4096, 1024, 64" in " ".join(cuts(NANO, Sizes(), (128, 128)))
    assert not list(cuts(NANO, Sizes(), (1, 64)))


@pytest.mark.parametrize(
    ("chosen", "change"),
    [
        ("nemotron_h", {"time_step_limit": [0.001, 0.1]}),
        ("nemotron_h", {"use_conv_bias": False}),
        ("nemotron_h", {"mlp_hidden_act": "silu"}),
        ("nemotron_h", {"residual_in_fp32": True}),
        ("bamba", {"time_step_limit": [0.0, 0.1]}),
        ("bamba", {"mamba_n_groups": 2}),
        ("bamba", {"mamba_conv_bias": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_the_mixer_does_not_compute_is_refused(config_of, chosen, change):
    with pytest.raises(CheckpointError, match=rf"{next(iter(change))}.*use --trainer embedded"):
        families.read({**config_of(chosen), **change})


def test_entries_of_published_files_are_no_obstacle(config_of):
    """What NVIDIA's files have beyond what Transformers writes."""
    more = {"norm_eps": 1e-5, "time_step_limit": [0.0, float("inf")], "mtp_hybrid_override_pattern": "*E", "attention_head_dim": 16,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rope_theta": 10000}  # fmt: skip
    assert not list(find_foreign(config_of("nemotron_h") | more))


def test_patterns_and_lists_name_the_same_layers(config_of):
    config = {name: value for name, value in config_of("nemotron_h").items() if name != "layers_block_type"}
    a = families.read({**config, "hybrid_override_pattern": "ME*-"})
    assert a == families.read(config_of("nemotron_h"))
    with pytest.raises(
        CheckpointError,
        match="a layer of kind G, and --trainer megatron has linear_attention, full_attention, moe, mlp",
    ):
        families.read({**config, "hybrid_override_pattern": "MG*-"})


def test_mtp_layers_are_exported_and_not_trained(changed):
    pytest.importorskip("megatron.core")
    given = {"trainer": "megatron", "hf_checkpoint": changed("nemotron_h", num_nextn_predict_layers=1)}
    assert any("1 MTP layers are not trained" in text for text in plan(**given).reviews)
    with pytest.raises(PlanError, match="stores its MTP layers outside of the decoder"):
        plan(["speculative"], enable_mtp_training=True, **given)
