"""What the plan says: options of SGLang's server, what is missing, what SGLang cannot do."""

from __future__ import annotations

import ast
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT

import miles_sglang
import miles_testing
from miles_core.plugin import ConfigError, PlanError
from miles_sglang import architectures, installed, read_server_args
from miles_sglang.config import SglangConfig, server_arguments
from miles_sglang.shapes import check_blocks
from miles_testing import toy

SOURCE = '''
CHOICES = ["one", "two"]

@dataclass
class ServerArgs:
    """Text."""

    model_path: A[str, Arg(help="h", aliases=["--model"]), NS("model")]
    kind: A[str, Arg(help="h", choices=CHOICES)] = "one"
    size: A[Optional[int], "h"] = None
    share: A[float, "h"] = 0.5
    names: A[Optional[List[str]], "h"] = None
    mode: A[Optional[Literal["a", "b"]], "h"] = None
    table: A[Optional[Dict[str, str]], "h"] = None
    flag: A[bool, "h"] = False
    place_runner: A[int, Arg(help="h", cli_name="--place")] = 0
'''


@pytest.fixture(autouse=True)
def with_sglang(request, monkeypatch, plan):
    """The manifest as it is where a tested SGLang is installed, but for tests of that condition itself."""
    if "version" in request.fixturenames:
        return
    monkeypatch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, packages=()))


def test_options_are_read_from_the_source():
    assert read_server_args.read(SOURCE) == [
        {"name": "model_path", "type": "str"},
        {"name": "kind", "type": "str", "choices": ["one", "two"], "default": "one"},
        {"name": "size", "type": "int"},
        {"name": "share", "type": "float", "default": 0.5},
        {"name": "names", "type": "list[str]"},
        {"name": "mode", "type": "str", "choices": ["a", "b"]},
        {"name": "table", "type": "json"},
        {"name": "flag", "type": "bool", "default": False},
        {"name": "place_runner", "type": "int", "cli": "place", "default": 0},
    ]


def test_the_table_is_that_of_the_installed_sglang():
    source = read_server_args.installed_source()
    if source is None:
        pytest.skip("SGLang is not installed")
    written = json.loads(read_server_args.TABLE.read_text())
    assert written["fields"] == read_server_args.read(source) and written["sglang"] in installed.TESTED


def test_only_what_was_given_reaches_sglang():
    options = SglangConfig(
        tp_size=2, enable_lora=False, grammar_backend="none", extra_metric_labels='{"a": "b"}', url="u"
    )
    assert server_arguments(options) == {
        "tp_size": 2,
        "enable_lora": False,
        "grammar_backend": "none",
        "extra_metric_labels": {"a": "b"},
    }


def test_options_are_checked_before_anything_is_started(plan):
    with pytest.raises(ConfigError, match=r"--sglang-mem-fraction-statik.*--sglang-mem-fraction-static"):
        plan(sglang_mem_fraction_statik=0.5)
    with pytest.raises(ConfigError, match=r"--sglang-model-path does not exist here: give --hf-checkpoint"):
        plan(sglang_model_path="x")
    with pytest.raises(ConfigError, match=r"sglang\.tp_size cannot be 'two'"):
        plan(sglang_tp_size="two")
    with pytest.raises(ConfigError, match=r"sglang.attention_backend cannot be 'tritn'.*triton"):
        plan(sglang_attention_backend="tritn")


def test_an_address_and_a_table_are_looked_at_in_the_plan(plan):
    for url in ("localhost:30000", "http://host:port", "http://:3"):
        with pytest.raises(PlanError, match="addresses like http://host:30000"):
            plan(engine="sglang", sglang_url=url)
    with pytest.raises(PlanError, match=r"JSON in --sglang-json-model-override-args(.|\n)*in double quotes"):
        plan(engine="sglang", sglang_url="http://host:30000", sglang_json_model_override_args="{bad")
    plan(engine="sglang", sglang_url="http://host:30000", sglang_json_model_override_args='{"a": 1}')


def test_a_separate_draft_has_no_mtp_layer(plan, tmp_path):
    given = {"sglang_speculative_algorithm": "STANDALONE", "sglang_speculative_draft_model_path": str(tmp_path)}
    for layers in (0, 1):
        (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": layers}))
        with nullcontext() if not layers else pytest.raises(PlanError, match="a draft model without an MTP layer"):
            plan(engine="sglang", sglang_url="http://host:30000", **given)


@pytest.mark.parametrize(
    ("version", "good"), [("0.5.17", True), ("0.5.17.post1", True), ("0.4.9", False), ("none", False)]
)
def test_a_plan_says_what_to_install(plan, version, good):
    given = {"engine": "sglang", "facts": [f"package.sglang={version}", "gpu.count=1"]}
    if good:
        assert "sglang" in plan(**given).order
        return
    with pytest.raises(PlanError, match=r"sglang needs sglang >=0.5.17,<0.5.18(.|\n)*pip install(.|\n)*--sglang-url"):
        plan(**given)
    plan(engine="sglang", sglang_url="http://host:30000", facts=[f"package.sglang={version}"])


def test_an_engine_without_a_gpu_is_refused(plan):
    with pytest.raises(PlanError, match=r"gpu.count > 0"):
        plan(engine="sglang", facts=["gpu.count=0"])
    accepted = plan(engine="sglang", facts=["gpu.count=1"])
    assert "sglang" in accepted.order and not accepted.fact("sglang.enable_return_routed_experts")
    assert "sglang" in plan(engine="sglang", device="cpu").order


def test_what_sglang_cannot_do_is_refused_with_the_reason(plan):
    gpu = ["gpu.count=8"]
    with pytest.raises(PlanError, match="data-parallel copies"):
        plan(engine="sglang", sglang_dp_size=2, facts=gpu)
    plan(engine="sglang", sglang_dp_size=2, sglang_enable_dp_attention=True, facts=gpu)
    given = {"engine": "sglang", "partial_rollout": True, "schedule": "async", "facts": gpu}
    with pytest.raises(PlanError, match="recorded with the version of the new weights"):
        plan(**given, pause_generation_mode="in_place")
    assert plan(**given, pause_generation_mode="retract").fact("rollout.pause_generation_mode") == "retract"
    for more in ({"sglang_url": "http://host:30000"}, {"sglang_pp_size": 2}, {"sglang_enable_dp_attention": True}):
        with pytest.raises(PlanError, match="token_versions"):
            plan(**given, **more, pause_generation_mode="retract")
    with pytest.raises(PlanError, match="only when no request is in flight"):
        plan(
            **given | {"schedule": "sync"}, over_sampling_batch_size=64, colocate=True, pause_generation_mode="retract"
        )
    warm_up = {"engine": "sglang", "warmup_steps": 2, "rollout_precision": "int4", "train_precision": "int4"}
    for more in ({"sglang_url": "http://host:30000"}, {"colocate": True}):
        with pytest.raises(PlanError, match=r"a warm-up to rollout.precision int4 needs not sglang.url and not"):
            plan(**warm_up, **more, facts=[*gpu, "gpu.sm=90"])
    plan(**warm_up, facts=[*gpu, "gpu.sm=90"])
    with pytest.raises(PlanError, match="sampling supports"):
        plan(engine="sglang", rollout_top_p=0.9, sglang_speculative_algorithm="EAGLE", facts=gpu)


def test_r3_makes_sglang_record_routed_experts(plan):
    accepted = plan(["r3"], engine="sglang", facts=["gpu.count=1"])
    assert accepted.fact("sglang.enable_return_routed_experts") is True
    assert not accepted.fact("sglang.disable_shared_experts_fusion")
    shared = plan(["r3"], engine="sglang", facts=["gpu.count=1", "model.type=qwen3_next"])
    assert shared.fact("sglang.disable_shared_experts_fusion") is True
    with pytest.raises(PlanError, match="does not pass the layer index to these models' routers"):
        plan(["r3"], engine="sglang", facts=["gpu.count=1", "model.type=mixtral"])


def test_drafts_that_sglang_cannot_serve_are_refused_with_the_reason(plan):
    def refused(said, facts=(), **options):
        with pytest.raises(PlanError, match=said):
            plan(engine="sglang", facts=["gpu.count=1", *facts], **{f"sglang_{k}": v for k, v in options.items()})

    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "small"}
    refused("no MTP layer to draft with", speculative_algorithm="NEXTN")
    refused("in these families only", ["model.mtp_layers=1", "model.type=qwen3"], speculative_algorithm="NEXTN")
    refused("drafts with a separate model", speculative_algorithm="STANDALONE")
    refused("SGLang drafts only with", speculative_num_steps=3)
    refused("would not have sampled", **draft, speculative_accept_threshold_acc=0.9)
    refused("does not support data-parallel attention", **draft, enable_dp_attention=True)
    refused("not part of every update", **draft, enable_memory_saver=True)
    rejection = {"speculative_use_rejection_sampling": True, "enable_deterministic_inference": True}
    head = ["model.mtp_layers=1", "model.type=glm4_moe"]
    refused("depend on the batch", head, speculative_algorithm="NEXTN", **rejection)
    backup = {"sglang_enable_draft_weights_cpu_backup": True}
    named = {f"sglang_{k}": v for k, v in draft.items()}
    accepted = plan(engine="sglang", facts=["gpu.count=1"], **named, **backup)
    assert accepted.fact("sglang.enable_memory_saver") is True
    with pytest.raises(PlanError, match="whatever the temperature"):
        plan(engine="sglang", device="cpu", **named)


def test_a_router_that_keeps_a_copy_of_its_weights_is_refused_on_a_server_that_runs_elsewhere(plan):
    facts = ["model.type=glm4_moe"]
    with pytest.raises(PlanError, match="with a copy of the weights that updates do not change"):
        plan(engine="sglang", sglang_url="http://host:30000", facts=facts)
    plan(engine="sglang", facts=[*facts, "gpu.count=1"])


def test_an_mtp_layer_is_trained_here_and_drafts_there(plan):
    """What the plugin that trains it wants of an engine is there when SGLang drafts with it, and only then."""
    facts = ["gpu.count=1", "model.mtp_layers=1", "model.type=glm4_moe"]
    options = {"engine": "sglang", "enable_mtp_training": True, "facts": facts}
    plan(["speculative"], sglang_speculative_algorithm="NEXTN", **options)
    with pytest.raises(PlanError, match="draft"):
        plan(["speculative"], **options)
    for other in ({"spec_lookahead": "3"}, {"spec_topk": 2}):
        with pytest.raises(PlanError, match="drafting on the embedded engine"):
            plan(["speculative"], sglang_speculative_algorithm="NEXTN", **options, **other)
    with pytest.raises(
        PlanError, match=r"reports neither the seconds(?s:.*)tokens_per_second of a run with drafts and one"
    ):
        plan(["speculative"], sglang_speculative_algorithm="NEXTN", profile_speculative=True, **options)


def test_a_draft_of_its_own_is_trained_here_and_drafts_there(plan):
    head = toy.toy_files("llama", hidden_size=16, num_hidden_layers=1) / "model"
    facts = ["gpu.count=1", "gpu.sm=90"]
    options = {
        **{
            "engine": "sglang",
            "sglang_speculative_algorithm": "STANDALONE",
            "sglang_speculative_draft_model_path": head,
        },
        **{"online_sft_interval": 1, "draft_ema_decay": 0.9},
    }
    assert "speculative" in plan(["speculative"], facts=facts, **options).order
    with pytest.raises(PlanError, match="a draft model and an EAGLE head learn with --online-sft-interval N"):
        plan(["speculative"], facts=facts, enable_mtp_training=True, **options)
    with pytest.raises(PlanError, match="SGLang reads the number format of a draft of its own"):
        plan(["speculative", "int4"], facts=facts, rollout_precision="int4", int4_group_size=16, **options)


def test_a_model_that_is_no_whole_blocks_is_refused_in_fp8():
    from miles_formats import Codec, FormatCodec
    from miles_fp8.format import Fp8

    smol = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    with pytest.raises(ConfigError, match=r"q_proj.weight is 576 x 576.*-hf gate_proj,k_proj,o_proj,q_proj\)"):
        check_blocks(smol, FormatCodec(Fp8()))
    check_blocks(smol, Codec())
    check_blocks({"hidden_size": 1024, "num_attention_heads": 8, "moe_intermediate_size": 512}, FormatCodec(Fp8()))


def test_the_architectures_are_those_of_the_installed_sglang():
    models = architectures.installed_models()
    if models is None:
        pytest.skip("SGLang is not installed")
    assert sorted(architectures.load_table()[1]) == architectures.read(models)


def test_families_whose_routes_the_installed_sglang_does_not_record_are_refused():
    models = architectures.installed_models()
    if models is None:
        pytest.skip("SGLang is not installed")
    types: dict[str, set[str]] = {}
    for kind, names in [*CAUSAL_LM.items(), *IMAGE_TEXT.items()]:
        for name in [names] if isinstance(names, str) else names:
            types.setdefault(name, set()).add(kind)
    trees = [ast.parse(path.read_bytes()) for path in models.glob("*.py")]
    blocks = {block.name for tree in trees for block in nodes(tree, ast.ClassDef) if has_unnumbered_router(block)}
    unrecorded: set[str] = set()
    for tree in trees:
        if blocks & {name.id for name in nodes(tree, ast.Name)} | blocks & {c.name for c in nodes(tree, ast.ClassDef)}:
            unrecorded |= set().union(*(types.get(name, set()) for name in architectures.registered(tree)))
    assert {"granitemoehybrid", "mixtral"} <= unrecorded <= set(miles_sglang._UNRECORDED.split(", "))


def nodes(tree: ast.AST, kind: type) -> list[Any]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def has_unnumbered_router(block: ast.ClassDef) -> bool:
    """Whether it constructs ``TopK`` without ``layer_id``."""
    calls = [c for c in nodes(block, ast.Call) if "TopK" in (getattr(c.func, "id", ""), getattr(c.func, "attr", ""))]
    return any(not {keyword.arg for keyword in call.keywords} & {"layer_id", None} for call in calls)


def test_architectures_are_read_from_the_source(tmp_path):
    (tmp_path / "a.py").write_text("class A: pass\nclass B: pass\nEntryClass = [A, B]\n")
    (tmp_path / "b.py").write_text("class C: pass\nEntryClass = C\n")
    (tmp_path / "c.py").write_text("class D: pass\n")
    assert architectures.read(tmp_path) == ["A", "B", "C"]
    assert architectures.load_table()[0] in installed.TESTED


def test_a_model_that_sglang_lacks_is_refused_unless_transformers_modules_are_asked_for(tmp_path, monkeypatch):
    published = Path(__file__).parents[3] / "tests" / "published" / "qwen3-0.6b.json"
    config = json.loads(published.read_text()) | {"architectures": ["OwnForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {
        "engine": "sglang",
        "hf_checkpoint": str(tmp_path),
        "facts": ["hardware=1xH200"],
        "colocate": True,
        "sglang_mem_fraction_static": 0.8,
    }
    with pytest.raises(PlanError) as error:
        miles_testing.plan(**given)
    text = str(error.value)
    assert "sglang needs a model that SGLang has" in text and "architectures = OwnForCausalLM" in text
    assert "--sglang-model-impl transformers" in text.split("would do:\n")[1]
    miles_testing.plan(**given, sglang_model_impl="transformers")
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "own_models")
    miles_testing.plan(**given)


def test_sglang_s_own_names_of_options_are_translated():
    tables = miles_sglang.plugin.foreign_flags
    assert tables["--sglang-tp"] == tables["--sglang-tensor-parallel-size"] == {"*": "--sglang-tp-size {}"}
    assert tables["--sglang-max-running-requests"] == {"*": "--max-running-requests {}"}
    assert tables["--sglang-cuda-graph-max-bs"] == {"*": "--sglang-cuda-graph-max-bs-decode {}"}
    names = {f"--sglang-{field}".replace("_", "-") for field in SglangConfig.__dataclass_fields__}
    assert {"--sglang-tp-size", "--sglang-cuda-graph-max-bs-decode"} <= names


@pytest.mark.parametrize(("quantized", "notes"), [("fp8", 1), ("none", 0)])
@pytest.mark.parametrize("engine", ["sglang", "embedded"])
def test_a_plan_says_that_the_format_of_a_checkpoint_is_not_that_of_the_rollout(plan, engine, quantized, notes):
    given = {"engine": engine, "facts": [f"model.quantized={quantized}", "gpu=H200"]}
    advice = [line for line in plan(**given).advice if "only --rollout-precision selects a format" in line]
    assert len(advice) == notes and all(line.startswith(engine) for line in advice)
    with_format = plan(rollout_fp8=True, emulate_precision=True, **given).advice
    assert not any("only --rollout-precision" in line for line in with_format)
