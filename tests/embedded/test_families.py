"""Every family of the table: engine and trainer against Transformers' own code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import dynamic_rope_update

from miles_core.errors import CheckpointError, PlanError
from miles_core.plugin.detect import config_facts
from miles_core.plugin.facts import Fact, Facts
from miles_embedded.engine.self_check import self_check
from miles_embedded.manifest import REFUSED, review
from miles_embedded.model.examine import examine_checkpoint
from miles_embedded.model.export import export_checkpoint
from miles_embedded.model.load import load_model
from miles_embedded.model.logprobs import head_steps
from miles_embedded.testing.comparison import compare, score_gap
from miles_embedded.testing.families import FAMILIES, family_checkpoint, lacking
from miles_embedded.testing.tiny_configuration import tiny_configuration
from miles_testing import plan, tiny_checkpoint
from miles_testing.tiny import random_checkpoint

#: What another family here has as well; the page's script compares these too.
ALIKE = {
    "qwen2",
    "ministral3",
    "gemma",
    "gemma3_text",
    "gemma4",
    "llama4",
    "llama, longrope",
    "hyperclovax",
    "glm4",
    "olmo2",
    "olmoe",
}
ALIKE |= {"qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "granitemoehybrid", "mamba"}
ALIKE |= {"smollm3", "starcoder2", "ernie4_5", "hunyuan_v1_dense", "seed_oss", "qwen2_vl", "cohere"}


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ALIKE])
def test_it_is_what_transformers_computes(family, tmp_path, monkeypatch):
    """By either way to attend on a CPU; every other family with recomputed activations."""
    if lacking(family):
        fixes = (
            "pip install 'transformers >=5.13'",
            "pip install 'transformers >=5.24'",
            "pip install 'transformers !=5.24.0'",
            "is there a newer release?",
        )
        assert any(fix in lacking(family) for fix in fixes)
        pytest.skip(lacking(family))
    number = list(FAMILIES).index(family)
    monkeypatch.setattr("miles_embedded.model.attention._SHORT", 64 * (number // 2 % 2))
    checkpoint = family_checkpoint(family, tmp_path / "model")
    examine_checkpoint(checkpoint)
    found = compare(checkpoint, recompute=number % 2 == 0)
    assert found.score < 2e-5 and found.greedy < 2e-5 and found.gradient < 1e-3 and found.export, found


def test_growing_frequencies_before_transformers_takes_a_set_for_each_row(tmp_path, monkeypatch):
    """A rotation that takes one set of frequencies a call, as all families did before Transformers 5.20."""

    def forward(self, x, position_ids):
        frequencies = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        angles = (frequencies @ position_ids[:, None, :].float()).transpose(1, 2).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    checkpoint = family_checkpoint("llama, dynamic", tmp_path / "model")
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.forward", dynamic_rope_update(forward)
    )
    assert score_gap(checkpoint) < 2e-5


def test_what_the_installed_transformers_lacks_is_refused(monkeypatch):
    def said(trusted=False, **config):
        facts = Facts([*config_facts(config), Fact("model.trust_remote_code", trusted, "")])
        return [(p.needs, p.because) for p in review(facts, config).problems]

    assert said(model_type=["qwen3"])[0][0] == "a model of type ['qwen3']"
    assert not said(model_type="qwen3") and not said() and not said(model_type="gemma3")
    (found,) = said(model_type="clip")
    assert found[0] == "a model of type clip" and "is there a newer release?" in found[1]
    own = {"model_type": "clip", "auto_map": {"AutoModelForCausalLM": "modeling.Clip"}}
    assert "--trust-remote-code" in said(**own)[0][1] and not said(trusted=True, **own)
    monkeypatch.setattr("miles_embedded.manifest.version", lambda name: "5.12.1")
    (found,) = said(model_type="granitemoe")
    assert "5.12.1" in found[0] and "transformers >=5.13" in found[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "phi3", "qwen3_next", "bamba"])
def test_the_self_check_lets_it_pass(family, tmp_path):
    if lacking(family):
        pytest.skip(lacking(family))
    self_check(
        load_model(family_checkpoint(family, tmp_path / family), dtype="bfloat16" if "moe" in family else "auto")
    )


def test_the_plan_refuses_what_was_late_and_no_installed_family_is_wrong():
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "every_family.json"
    found = json.loads(results.read_text(encoding="utf-8"))
    outcomes = {entry["outcome"] for entry in found["families"].values()}
    assert outcomes <= {"exact", "refused", "not tried"} and found["counts"]["exact"] >= 190
    for kind in ("bloom", "chameleon", "musicgen", "reformer", "diffusion_gemma", "gemma4_assistant"):
        assert review(Facts(config_facts({"model_type": kind})), {"model_type": kind}).problems, kind


def test_the_page_lists_them_and_what_the_plan_refuses():
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    table, refused = page.split("## Refused")
    assert re.findall(r"^\| ([\w, ]+) \| [\d.]+e", table, re.MULTILINE) == list(FAMILIES)
    for why, types in REFUSED.items():
        assert why in refused and all(f"`{name}`" in refused for name in types)


@pytest.mark.parametrize(
    ("kind", "layers", "words"),
    [
        ("rwkv", None, "cannot run a model of type rwkv"),
        ("bloom", None, "cannot run a model of type bloom"),
        ("made_up", ["full_attention", "rwkv"], "cannot run layers of type rwkv (layer_types in config.json)"),
        ("qwen3", ["full_attention", "sliding_attention"], ""),
        pytest.param(
            *("granitemoehybrid", ["mamba", "attention"], ""),
            marks=pytest.mark.skipif(bool(lacking("granitemoehybrid")), reason=lacking("granitemoehybrid")),
        ),
    ],
)
def test_the_plan_says_no_to_what_the_build_would_refuse(kind, layers, words):
    config = {"model_type": kind} | ({"layer_types": layers} if layers else {})
    found = review(Facts(config_facts(config)), config).problems
    assert [p.headline.removeprefix("embedded ") for p in found] == [words] * bool(words)
    with pytest.raises(PlanError, match="use another engine and trainer"):
        plan(facts=["model.type=rwkv"])


@pytest.mark.skipif(bool(lacking("qwen3_next")), reason=lacking("qwen3_next"))
@pytest.mark.parametrize(
    ("limit", "refused"),
    [
        ([0.0, float("inf")], False),
        ([0.0, {"__float__": "Infinity"}], False),
        ([0.0, 0.1], True),
        ([0.001, float("inf")], True),
    ],
)
def test_limits_of_time_steps_that_transformers_applies_to_prompts_only_are_refused(limit, refused):
    config = {"model_type": "nemotron_h", "time_step_limit": limit}
    found = review(Facts(config_facts(config)), config).problems
    assert bool(found) == refused and all("(time_step_limit in config.json)" in p.headline for p in found)


@pytest.mark.skipif(bool(lacking("qwen3_next")), reason=lacking("qwen3_next"))
def test_a_model_without_a_longest_sequence_needs_the_option():
    config = {"model_type": "mamba2"}
    facts = [*config_facts(config), Fact("engine", "embedded", "")]
    (found,) = review(Facts(facts), config).problems
    assert "a model of type mamba2 without --rollout-max-context-len" in found.headline
    assert not review(Facts([*facts, Fact("rollout.max_context_len", 64, "")]), config).problems


@pytest.mark.skipif(bool(lacking("qwen3_next")), reason=lacking("qwen3_next"))
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_next"},
        {"model_type": "lfm3_vl", "text_config": {"layer_types": ["conv", "full_attention"]}},
    ],
)
@pytest.mark.parametrize(
    ("plugin", "why"), [("speculative", "rejected drafts"), ("true_on_policy", "another order of additions")]
)
def test_plugins_that_layers_with_a_state_rule_out_are_refused_in_the_plan(config, plugin, why):
    facts = [*config_facts(config), Fact("engine", "embedded", ""), Fact(f"plugin.{plugin}", True, "")]
    (found,) = review(Facts(facts), config).problems
    assert f"model of type {config['model_type']} with the plugin {plugin}" in found.headline and why in found.because
    assert not review(Facts(facts[:-1]), config).problems


def test_a_gpu_that_is_not_there_is_refused_in_the_plan():
    with pytest.raises(PlanError, match=r"embedded needs a GPU[\s\S]*would do:\n(.*\n)?    --device cpu"):
        plan(device="cuda", facts=["gpu=none"])
    plan(device="cuda", facts=["gpu=H200"])


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "aya_vision", "cohere2_vision"]
)
def test_a_checkpoint_with_vision_is_planned_as_transformers_saves_it_and_as_we_export_it(family, tmp_path):
    """Its language model has a type of its own, which no class of Transformers loads."""
    config = CONFIG_MAPPING[family]
    given = FAMILIES[family][1] if family in FAMILIES else None
    made = config(**given) if given else tiny_configuration(config)
    checkpoint = random_checkpoint(made, tmp_path / "model")
    stored = json.loads((checkpoint / "config.json").read_text())
    assert stored["text_config"]["model_type"] != family == stored["model_type"]
    export_checkpoint(load_model(checkpoint, "float32"), None, tmp_path / "export")
    for directory in (checkpoint, tmp_path / "export"):
        known = {fact.name: fact.value for fact in plan(hf_checkpoint=str(directory)).facts}
        assert known["model.type"] == family
        assert score_gap(directory) < 2e-5


def test_a_flat_configuration_of_qwen2_5_vl_is_planned_before_and_after_an_export(tmp_path):
    """As Qwen published it: the language model's entries are at the top."""
    checkpoint = family_checkpoint("qwen2_5_vl", tmp_path / "model")
    config = json.loads((checkpoint / "config.json").read_text())
    text = {name: value for name, value in config.pop("text_config").items() if name not in ("model_type", "dtype")}
    (checkpoint / "config.json").write_text(json.dumps(text | config))
    export_checkpoint(load_model(checkpoint, "float32"), None, tmp_path / "export")
    for directory in (checkpoint, tmp_path / "export"):
        known = {fact.name: fact.value for fact in plan(hf_checkpoint=str(directory)).facts}
        assert (known["model.type"], known["model.layers"]) == ("qwen2_5_vl", 2)


def test_logits_take_the_steps_that_their_class_takes(tmp_path):
    """Cohere's language model scales its logits when it stands alone; with a vision tower its class leaves that out."""
    kinds = (
        transformers.CohereForCausalLM,
        transformers.AyaVisionForConditionalGeneration,
        transformers.Gemma2ForCausalLM,
    )
    assert [set(head_steps(kind)) for kind in kinds] == [{"logit_scale"}, set(), {"final_logit_softcapping"}]
    inherits = type(
        "Own", (transformers.CohereForCausalLM,), {"forward": lambda self, x: super(type(self), self).forward(x)}
    )
    assert head_steps(inherits) == {"logit_scale"}
    llama = tiny_checkpoint("llama", tmp_path / "model")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"logit_scale": 0.25, "final_logit_softcapping": 1.0}))
    assert score_gap(llama) < 2e-5  # entries that Llama's class does not read


@pytest.mark.skipif("kimi_k25" not in CONFIG_MAPPING, reason="this Transformers has no kimi_k25")
def test_a_family_that_cannot_be_exported_is_refused_before_it_is_loaded(tmp_path):
    checkpoint = random_checkpoint(tiny_configuration(CONFIG_MAPPING["kimi_k25"]), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"Kimi_K25.*by more than slicing.*use another engine and trainer"):
        examine_checkpoint(checkpoint)


@pytest.mark.skipif("mistral4" not in CONFIG_MAPPING, reason="this Transformers has no mistral4")
def test_a_text_model_that_transformers_lists_among_those_of_images_is_exact(tmp_path):
    checkpoint = random_checkpoint(tiny_configuration(CONFIG_MAPPING["mistral4"]), tmp_path / "model")
    examine_checkpoint(checkpoint)
    assert score_gap(checkpoint) < 2e-5
