"""Checkpoints with all experts in one tensor: converter, weight sync, trainer and engine still hold the same bytes."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from miles_core.cli import main as cli
from miles_core.config.load import load
from miles_core.errors import CheckpointError
from miles_core.mismatch.parity import real_layer
from miles_embedded.model.load import load_model
from miles_embedded.model.views import Loader, export, views
from miles_embedded.quantized.weights import install
from miles_formats.codec import FormatCodec
from miles_formats.convert.installed import format_class, providers
from miles_formats.options import codec_for
from miles_testing.tiny import tiny_checkpoint
from miles_testing.toy import toy_files, toy_run

FORMATS = sorted(providers())
WIDTH, INNER, EXPERTS = 160, 96, 2  # no multiple of 128: tiles of fp8 are ragged on both sides
SIZES = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
MODELS = {
    "gpt_oss": transformers.GptOssConfig(**SIZES),
    "llama4_text": transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=192, layer_types=["full_attention"] * 2
    ),
}
#: format -> its options
OPTIONS = {"int4": ["--int4-group-size", "32"]}


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    """A random model of a family that joins experts, in float32, with rows and columns of very different sizes."""
    directory = tmp_path_factory.mktemp("joined") / request.param
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[request.param]).save_pretrained(directory)
    path = directory / "model.safetensors"
    stored = {}
    for name, tensor in load_file(path).items():
        rows, columns = (torch.logspace(-1, 1, n) for n in (tensor.shape[-2:] if tensor.ndim > 1 else (1, len(tensor))))
        stored[name] = torch.randn(tensor.shape) * (rows[:, None] * columns if tensor.ndim > 1 else 1)
    save_file(stored, path, metadata={"format": "pt"})
    return directory


def expected(family, name, stored):
    """A matrix as a plain reading of the family's layout finds it."""
    stem, _, rest = name.partition(".experts.")
    index, _, part = rest.partition(".")
    slab = stored[f"{stem}.experts.{'down_proj' if part == 'down_proj.weight' else 'gate_up_proj'}"][int(index)].T
    if part == "down_proj.weight":
        return slab
    which = ("gate_proj.weight", "up_proj.weight").index(part)
    return slab[which::2] if family == "gpt_oss" else slab[which * INNER : (which + 1) * INNER]


@pytest.mark.parametrize("name", FORMATS)
def test_every_side_encodes_each_expert_apart_with_the_same_bytes(checkpoint, tmp_path, name):
    out, words = tmp_path / "out", OPTIONS.get(name, [])
    assert cli.main(["convert", "--to", name, "--model-dir", str(checkpoint), "--save-dir", str(out), *words]) == 0
    converted = {n: t for file in out.glob("*.safetensors") for n, t in load_file(file).items()}
    model = load_model(checkpoint, "float32")
    codec = codec_for(format_class(name), load(["--rollout-precision", name, *words]), str(checkpoint))
    synced, values = {}, {}
    for encoded in codec.encode(export(model)):
        synced |= {n: t.contiguous() for n, t in encoded.parts.items()}
        values[encoded.name] = codec.decode(encoded)
    assert {n: (t.dtype, t.shape) for n, t in converted.items()} == {n: (t.dtype, t.shape) for n, t in synced.items()}
    assert all(torch.equal(raw(converted[n]), raw(t)) for n, t in synced.items())

    stored = load_file(checkpoint / "model.safetensors")
    experts = [n for n in values if ".experts." in n and n.endswith(".weight")]
    assert len(experts) == 2 * EXPERTS * 3
    quantizer, received = install(model, codec), load_model(checkpoint, "float32")
    loader = Loader(received)
    for n, value in values.items():
        loader.put(n, value)
    assert not loader.missing()
    engines = [dict(m.named_parameters()) for m in (load_model(out, "float32"), received)]
    for engine in engines:
        for view in views(model):
            plain = view.source not in quantizer.sources
            mine = model.get_parameter(view.source) if plain else quantizer.value(view.source)
            assert torch.equal(mine, engine[view.source]), view.name
    computed = {source: quantizer.value(source) for source in quantizer.sources}
    for n in experts:
        matrix = expected(checkpoint.name, n, stored)
        assert torch.equal(values[n], decoded(codec, n, matrix, stored, checkpoint.name)), n
        assert torch.equal(expected(checkpoint.name, n, computed), values[n]), n


def decoded(codec, name, matrix, stored, family):
    """The round trip of one matrix by the format alone, from its BF16 rounding."""
    format, copy = codec.format, matrix.bfloat16()
    stats = format.stats(copy)
    couple = next((group for group in format.couple if name.split(".")[-2] in group), ())
    for part in couple:
        other = expected(family, name.replace(name.split(".")[-2], part), stored).bfloat16()
        stats = torch.maximum(stats, format.stats(other))
    return format.dequantize(format.quantize(copy, stats))


@pytest.mark.parametrize("name", FORMATS)
def test_dequantising_restores_the_familys_layout_with_the_values_of_the_codes(checkpoint, tmp_path, name):
    out, back, words = tmp_path / "out", tmp_path / "back", OPTIONS.get(name, [])
    assert cli.main(["convert", "--to", name, "--model-dir", str(checkpoint), "--save-dir", str(out), *words]) == 0
    assert cli.main(["convert", "--to", "bf16", "--model-dir", str(out), "--save-dir", str(back)]) == 0
    stored, found = (load_file(directory / "model.safetensors") for directory in (checkpoint, back))
    assert {n: t.shape for n, t in stored.items()} == {n: t.shape for n, t in found.items()}
    values = dict(load_model(out, "float32").named_parameters())
    for n, tensor in found.items():
        assert torch.equal(tensor, values[n].to(tensor.dtype)), n
        error = (tensor.float() - stored[n]).norm() / stored[n].norm()
        assert (0 < error < 0.2) if tensor.dtype == torch.bfloat16 else error == 0, n


def run_experts(module, hidden, chosen, score):
    """Each row of ``hidden`` through its one expert, as the family's layer calls the module."""
    if not isinstance(module, Llama4TextExperts):
        return module(hidden, chosen[:, None], score[:, None])
    scores = torch.zeros(EXPERTS, len(hidden)).scatter(0, chosen[None], score[None])
    return module((hidden * scores[:, :, None]).flatten(0, 1)).view(EXPERTS, *hidden.shape).sum(0)


def by_hand(module, hidden, chosen, score, rounded):
    """The same from the family's definition, in the module's weights; ``rounded`` is what a product reads."""
    rows = []
    for x, e, s in zip(hidden, chosen.tolist(), score, strict=True):
        if isinstance(module, Llama4TextExperts):
            gate, up = (rounded(x * s) @ module.gate_up_proj[e]).chunk(2)
            rows.append(rounded(up * module.act_fn(gate)) @ module.down_proj[e])
        else:
            h = module._apply_gate(rounded(x) @ module.gate_up_proj[e] + module.gate_up_proj_bias[e])
            rows.append(s * (rounded(h) @ module.down_proj[e] + module.down_proj_bias[e]))
    return torch.stack(rows)


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", FORMATS)
def test_experts_compute_with_the_codes_and_the_gradient_is_straight_through(checkpoint, name):
    codec = codec_for(format_class(name), load(["--rollout-precision", name, *OPTIONS.get(name, [])]), str(checkpoint))
    model, engine = load_model(checkpoint, "float32"), load_model(checkpoint, "float32")
    install(model, codec)
    loader = Loader(engine)
    for encoded in codec.encode(export(model)):
        loader.put(encoded.name, codec.decode(encoded))
    trained, served = ([x for n, x in m.named_modules() if n.endswith(".experts")][1] for m in (model, engine))

    def rounded(x):
        return x + (codec.format.fake_quantize_activation(x) - x).detach()

    generator = torch.Generator().manual_seed(0)
    given = (
        torch.randn(6, WIDTH, generator=generator) * 0.1,
        torch.tensor([0, 1, 1, 0, 1, 1]),
        torch.rand(6, generator=generator),
    )
    found, expected = run_experts(trained, *given), by_hand(served, *given, rounded)
    # a value at the boundary between two codes may fall to either side, which moves one of 96 by 6 %
    assert distance(found, expected) < 0.01
    assert codec.format.quantizes_activations == (distance(run_experts(served, *given), expected) > 0.01)
    found.square().sum().backward()
    expected.square().sum().backward()
    for n, parameter in served.named_parameters():
        assert distance(trained.get_parameter(n).grad, parameter.grad) < 0.02, n


def test_a_codec_that_does_not_know_the_family_refuses_joined_experts(checkpoint):
    model, codec = load_model(checkpoint, "float32"), FormatCodec(format_class(FORMATS[0])())
    with pytest.raises(CheckpointError, match=r"experts\.\w+ .*holds all experts of a layer"):
        list(codec.encode(export(model)))


@pytest.mark.parametrize("name", FORMATS)
def test_experts_that_are_left_alone_stay_joined_on_every_side(checkpoint, tmp_path, name, capsys):
    out, words = tmp_path / "out", [*OPTIONS.get(name, []), "--extra-high-precision-layers-hf", "experts"]
    code = cli.main(["convert", "--to", name, "--model-dir", str(checkpoint), "--save-dir", str(out), *words])
    if code == 2 and "leaves nothing to quantise" in capsys.readouterr().err:
        pytest.skip(f"{name} is for experts only")
    assert code == 0
    converted = load_file(out / "model.safetensors")
    codec = codec_for(format_class(name), load(["--rollout-precision", name, *words]), str(checkpoint))
    model = load_model(checkpoint, "float32")
    synced = {n: t for e in codec.encode(export(model)) for n, t in e.parts.items()}
    assert set(synced) == set(converted)
    assert all(torch.equal(raw(synced[n]), raw(t)) for n, t in converted.items())
    assert any(n.endswith("experts.gate_up_proj") for n in converted)
    assert not any("experts" in source for source in install(model, codec).sources)


def test_a_layer_left_alone_travels_expert_by_expert_like_the_others(checkpoint):
    """Engines switch to joined names for good when they see one."""
    words = ["--rollout-precision", "fp8", "--num-layers-at-start-in-bf16", "1"]
    codec = codec_for(format_class("fp8"), load(words), str(checkpoint))
    sent = {e.name: e.format for e in codec.encode(export(load_model(checkpoint, "float32")))}
    experts = {n: f for n, f in sent.items() if ".experts." in n and n.endswith("_proj.weight")}
    assert len(experts) == 2 * EXPERTS * 3
    assert {(f, "layers.0." in n) for n, f in experts.items()} == {("", True), ("fp8", False)}


def test_the_parity_probe_is_of_an_expert_where_only_experts_are_quantised(checkpoint):
    codec = codec_for(format_class("nvfp4"), load(["--rollout-precision", "nvfp4"]), str(checkpoint))
    ((name, matrix),) = real_layer(export(load_model(checkpoint, "float32")), codec).items()
    assert name.endswith("layers.0.mlp.experts.0.gate_proj.weight") or "feed_forward.experts.0" in name
    assert matrix.shape == (INNER, WIDTH)


def test_a_run_of_gpt_oss_trains_and_samples_with_the_same_codes(tmp_path):
    """The whole loop, which nothing else runs on joined experts; the mixed run shows that the gap is seen."""
    directory = tiny_checkpoint(
        "gpt_oss", tmp_path / "model", vocab_size=320, hidden_size=WIDTH, intermediate_size=INNER
    )
    for file in (toy_files() / "model").glob("token*"):
        shutil.copy(file, directory / file.name)
    gaps = {}
    for train in ("fp8", "bf16"):
        run = toy_run(steps=1, hf_checkpoint=directory, rollout_fp8=True, train_precision=train, emulate_precision=True)
        gaps[train] = run.metrics[-1]["mismatch/abs_log_prob"]
    assert gaps["fp8"] < 1e-4 < 1e-3 < gaps["bf16"]
