"""What a conversion refuses from headers alone, and how joined experts are taken apart."""

import json

import pytest
import torch
from safetensors.torch import load_file

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.errors import CheckpointError, ConfigError
from miles_formats.codec import FormatCodec
from miles_formats.convert import conversion, decode, encode
from miles_formats.selector import Selector
from miles_testing.doubles.pair_format import PairFormat

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
EXPERTS = "model.layers.0.feed_forward.experts"


def plan(directory, selector=None):
    return encode.to_format(CheckpointFiles(directory), FormatCodec(PairFormat(), selector))


def test_a_lone_half_is_refused(checkpoint, tensors):
    del tensors[UP]
    with pytest.raises(CheckpointError, match=rf"{GATE}: pair8 encodes it together with {UP}, which is not in the"):
        plan(checkpoint({"model.safetensors": tensors}))


def test_a_half_left_alone_by_a_selector_is_refused(checkpoint, tensors):
    with pytest.raises(CheckpointError, match=r"which is left alone by a selector; quantise both or neither"):
        plan(checkpoint({"model.safetensors": tensors}), Selector(("up_proj",)))


def test_a_size_the_format_cannot_store_is_named_with_those_that_fit(checkpoint, tensors, weight):
    tensors["a.q_proj.weight"] = weight(4, 7)
    tensors["b.q_proj.weight"] = weight(4, 9)
    with pytest.raises(ConfigError, match=r"a.q_proj.weight \[4, 7\] cannot be stored as pair8: .*6 or 8.*2 weights"):
        plan(checkpoint({"model.safetensors": tensors}))


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "awq"}},
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
        {"compression_config": {"quant_method": "awq"}},
    ],
)
def test_an_already_quantised_checkpoint_is_refused(checkpoint, tensors, config):
    with pytest.raises(CheckpointError, match=r"already quantised \(quant_method 'awq'.*no installed .* from its BF16"):
        plan(checkpoint({"model.safetensors": tensors}, **config))


@pytest.mark.usefixtures("pair8")
def test_an_already_quantised_checkpoint_that_can_be_dequantised_says_how(checkpoint, tensors):
    block = {"quantization_config": {"quant_method": "pair8"}}
    with pytest.raises(CheckpointError, match=r"already quantised \(quant_method 'pair8'.*--to bf16 first"):
        plan(checkpoint({"model.safetensors": tensors}, **block))


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "mxfp4"}}])
def test_the_mxfp4_checkpoints_of_gpt_oss_are_refused_as_quantised(checkpoint, config):
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    coded = {f"{stem}_blocks": torch.zeros(2, 8, 1, 16, dtype=torch.uint8)}
    coded |= {f"{stem}_scales": torch.zeros(2, 8, 1, dtype=torch.uint8)}
    source = checkpoint({"model.safetensors": coded}, model_type="gpt_oss", hidden_size=32, **config)
    how = "quant_method 'mxfp4'" if config else f"{stem}_(blocks|scales) is uint8"
    with pytest.raises(CheckpointError, match=rf"already quantised \({how}.*no installed number format reads it"):
        plan(source)


def test_quantised_weights_are_seen_without_a_word_in_the_configuration(checkpoint, tensors):
    tensors[GATE] = tensors[GATE].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"already quantised .*float8_e4m3fn"):
        plan(checkpoint({"model.safetensors": tensors}))
    side = checkpoint({"model.safetensors": {"a.q_proj.weight": tensors[UP]}}, name="side")
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (side / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"already quantised .*modelopt"):
        plan(side)


@pytest.mark.usefixtures("pair8")
def test_a_part_that_is_missing_or_does_not_fit_is_named(checkpoint, weight):
    block = {"quantization_config": {"quant_method": "pair8"}}
    codes = torch.zeros(4, 4, dtype=torch.int16)
    half = checkpoint({"model.safetensors": {"a.weight_codes": codes}}, name="half", **block)
    with pytest.raises(CheckpointError, match=r"a.weight_codes is in .*, but a.weight_range is nowhere"):
        decode.open_quantized(half)
    odd = {"a.weight_codes": codes, "a.weight_range": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"a: no weight in pair8 is stored as .*weight_range \[3\]"):
        decode.open_quantized(checkpoint({"model.safetensors": odd}, name="odd", **block))
    plain = checkpoint({"model.safetensors": {"a.weight": weight(2, 2)}}, name="plain", **block)
    with pytest.raises(CheckpointError, match=r"its configuration says pair8, but no tensor is stored so"):
        decode.open_quantized(plain)


@pytest.mark.usefixtures("pair8")
def test_a_checkpoint_that_no_installed_format_recognises_is_refused(checkpoint, tensors):
    unknown = checkpoint({"model.safetensors": tensors}, quantization_config={"quant_method": "pair9"})
    with pytest.raises(
        CheckpointError, match=r"no installed number format recognises \(installed: pair8\); install the plugin"
    ):
        decode.open_quantized(unknown)
    assert decode.open_quantized(checkpoint({"model.safetensors": tensors}, name="plain")) is None


def joined(weight, transposed, interleaved=False):
    """Two experts, H = 4 inputs, I = 6: as the family joins them, and apart."""
    apart = {}
    for expert in range(2):
        for part, shape in (("gate_proj", (6, 4)), ("up_proj", (6, 4)), ("down_proj", (4, 6))):
            apart[f"{EXPERTS}.{expert}.{part}.weight"] = weight(*shape)

    def slab(*matrices):
        if not interleaved:
            return torch.cat(matrices)
        return torch.stack([row for rows in zip(*matrices, strict=True) for row in rows])  # gate, up, gate, up, ...

    def slabs(*parts):
        found = [slab(*(apart[f"{EXPERTS}.{e}.{p}.weight"] for p in parts)) for e in range(2)]
        return torch.stack([slab.T if transposed else slab for slab in found]).contiguous()

    whole = {f"{EXPERTS}.gate_up_proj": slabs("gate_proj", "up_proj"), f"{EXPERTS}.down_proj": slabs("down_proj")}
    return whole, apart


@pytest.mark.usefixtures("pair8")
@pytest.mark.parametrize(
    ("family", "transposed"), [("llama4", True), ("qwen3_5_moe", False), ("gpt_oss", True), ("gemma4", False)]
)
def test_joined_experts_are_quantised_apart_along_k_and_joined_again(checkpoint, weight, tmp_path, family, transposed):
    whole, apart = joined(weight, transposed, interleaved=family == "gpt_oss")
    rest = {"model.norm.weight": weight(4), f"{EXPERTS}.gate_up_proj_bias": weight(2, 12)}
    source = checkpoint({"model.safetensors": whole | rest}, model_type=family, text_config={"hidden_size": 4})
    conversion.run(plan(source), tmp_path / "out", workers=1)
    same = checkpoint({"model.safetensors": apart | rest}, name="apart")
    conversion.run(plan(same), tmp_path / "same", workers=1)
    found, expected = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "same"))
    assert set(found) == set(expected) and all(torch.equal(found[n], expected[n]) for n in expected)

    opened = decode.open_quantized(tmp_path / "out")
    assert opened is not None
    conversion.run(decode.to_bf16(opened), tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {n: t.shape for n, t in back.items()} == {n: t.shape for n, t in (whole | rest).items()}
    for name, tensor in opened.tensors(torch.bfloat16):
        assert torch.equal(tensor, back[name])
    error = (back[f"{EXPERTS}.gate_up_proj"].float() - whole[f"{EXPERTS}.gate_up_proj"].float()).abs().max()
    assert 0 < error < 0.05


def test_joined_experts_of_an_unknown_family_are_refused_unless_left_alone(checkpoint, weight):
    whole, _ = joined(weight, True)
    source = checkpoint({"model.safetensors": whole | {"a.q_proj.weight": weight(4, 4)}}, model_type="aria")
    with pytest.raises(CheckpointError, match=r"down_proj \[2, 6, 4\] holds all experts .*'aria'.*llama4"):
        plan(source)
    conversion = plan(source, Selector(("experts",)))
    assert [i.name for i in conversion.changed] == ["a.q_proj.weight"]
    assert f"{EXPERTS}.gate_up_proj" in {t.name for job in conversion.jobs for t in job.targets}


@pytest.mark.usefixtures("pair8")
def test_a_missing_expert_is_named(checkpoint, weight, tmp_path):
    whole, _ = joined(weight, True)
    conversion.run(plan(checkpoint({"model.safetensors": whole}, model_type="llama4")), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    lost = {n: t for n, t in stored.items() if f"{EXPERTS}.0.up_proj" not in n}
    block = {"quant_method": "pair8"}
    with pytest.raises(CheckpointError, match=rf"{EXPERTS}.0.up_proj.weight is missing: .* has 2 experts"):
        decode.open_quantized(
            checkpoint({"model.safetensors": lost}, name="lost", model_type="llama4", quantization_config=block)
        )


def test_projections_that_engines_join_are_noted_when_only_some_are_quantised(checkpoint, tensors, weight):
    tensors |= {f"model.layers.0.self_attn.{p}_proj.weight": weight(8, 8) for p in "kv"}
    source = checkpoint({"model.safetensors": tensors})
    assert plan(source).notes == []
    notes = plan(source, Selector(("k_proj",))).notes
    assert (
        len(notes) == 1 and "q_proj.weight is quantised and model.layers.0.self_attn.k_proj.weight is not" in notes[0]
    )


def test_heads_of_mtp_layers_and_the_indexers_weights_keep_their_precision(checkpoint, weight):
    names = ("layers.3.shared_head.head.weight", "layers.0.self_attn.indexer.weights_proj.weight", "a.q_proj.weight")
    conversion = plan(checkpoint({"model.safetensors": {name: weight(4, 4) for name in names}}))
    assert [item.name for item in conversion.changed] == ["a.q_proj.weight"]


def test_experts_left_alone_are_named_one_by_one_and_as_the_module_engines_have(checkpoint, weight):
    names = [f"layers.{i}.mlp.experts.{e}.down_proj.weight" for i in range(2) for e in range(2)]
    source = checkpoint({"model.safetensors": {name: weight(4, 4) for name in names}})
    ignored = json.loads(plan(source, Selector(("layers.0.",))).texts["config.json"])["quantization_config"]["ignore"]
    first = [name.removesuffix(".weight") for name in names[:2]]
    assert ignored == [*first, "layers.0.mlp.experts", "lm_head"]


def test_users_of_gpt_oss_are_told_who_reads_quantised_experts(checkpoint, weight):
    whole, _ = joined(weight, True, interleaved=True)
    source = checkpoint({"model.safetensors": whole | {"a.q_proj.weight": weight(4, 4)}}, model_type="gpt_oss")
    assert any("engines read experts of gpt_oss only joined" in note for note in plan(source).notes)
    assert plan(source, Selector(("experts",))).notes == []


def test_joined_experts_stay_together_where_none_is_quantised_whatever_selected_them(checkpoint, weight):
    whole, _ = joined(weight, True)
    source = checkpoint({"model.safetensors": whole | {"a.q_proj.weight": weight(4, 4)}}, model_type="llama4")
    conversion = plan(source, Selector(("*.experts.*.gate_proj.weight", "up_proj", "*.experts.*.down_proj.*")))
    assert {t.name for job in conversion.jobs for t in job.targets} >= set(whole)
    reasons = {item.name: item.reason for item in conversion.items}
    assert "*.experts.*.gate_proj.weight" in reasons[f"{EXPERTS}.gate_up_proj"]
    partly = plan(source, Selector(("*.experts.0.*", "down_proj")))  # one expert is enough to take all apart
    assert {item.name for item in partly.changed if "experts" in item.name} == {
        f"{EXPERTS}.1.{part}.weight" for part in ("gate_proj", "up_proj")
    }
    assert not {t.name for job in partly.jobs for t in job.targets} & set(whole)


#: What is kept beside the language model, as the families name it; ``layers.0`` in each is a layer of the decoder.
MULTIMODAL = {
    "gemma3": (
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "multi_modal_projector.mm_input_projection.weight",
    ),
    "gemma3n": (
        "model.language_model.layers.0.mlp.down_proj.weight",
        "model.audio_tower.conformer.0.attention.attn.q_proj.weight",
        "model.vision_tower.timm_model.blocks.0.0.conv_pw.weight",
    ),
    "llama4": (
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "vision_model.model.layers.0.mlp.fc1.weight",
        "multi_modal_projector.linear_1.weight",
    ),
    "glm4v_moe": (
        "model.language_model.layers.0.self_attn.q_proj.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "model.visual.merger.gate_proj.weight",
    ),
    "qwen2_5_vl": (
        "model.layers.0.self_attn.q_proj.weight",
        "visual.blocks.0.mlp.up_proj.weight",
        "visual.merger.mlp.0.weight",
    ),
    "qwen3_omni_moe": (
        "thinker.model.layers.0.self_attn.q_proj.weight",
        "thinker.audio_tower.layers.0.self_attn.q_proj.weight",
        "talker.model.layers.0.mlp.up_proj.weight",
    ),
    "kimi_vl": (
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
    ),
    "internvl": (
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "vision_model.a.attn.qkv.weight",
        "mlp1.1.weight",
    ),
}


@pytest.mark.parametrize("family", MULTIMODAL)
def test_towers_of_other_modalities_keep_their_precision_and_are_named(checkpoint, weight, family):
    text, *others = MULTIMODAL[family]
    shapes = {text: (4, 4)} | dict.fromkeys(others, (3, 5))  # which the format could not even store
    conversion = plan(checkpoint({"model.safetensors": {n: weight(*s) for n, s in shapes.items()}}, model_type=family))
    assert [item.name for item in conversion.changed] == [text]
    reasons = {item.name: item.reason for item in conversion.items if item.reason}
    assert set(reasons) == set(others)
    assert all(reason.endswith("is not of the language model") for reason in reasons.values())
    ignored = json.loads(conversion.texts["config.json"])["quantization_config"]["ignore"]
    assert {name.removesuffix(".weight") for name in others} < set(ignored)
    towers = {reason.split()[2] for reason in reasons.values()}
    assert towers < set(ignored) and all(f".{t}." in f".{n}" for n, r in reasons.items() for t in [r.split()[2]])
    assert not any(text.startswith(module) for module in ignored)


def test_what_a_decoder_layer_calls_by_a_towers_name_is_quantised(checkpoint, weight):
    names = ["model.layers.0.mlp.vision_moe.down_proj.weight", "model.layers.0.connector.weight"]
    conversion = plan(checkpoint({"model.safetensors": {n: weight(4, 4) for n in names}}))
    assert {item.name for item in conversion.changed} == set(names)


def test_what_a_format_has_to_say_of_a_size_is_a_note(checkpoint, tensors, monkeypatch):
    source = checkpoint({"model.safetensors": tensors})
    monkeypatch.setattr(PairFormat, "caution", lambda self, shape: "mind it" if shape == (12, 8) else None)
    assert f"{GATE} [12, 8] as pair8: mind it (2 weights like this)" in plan(source).notes
