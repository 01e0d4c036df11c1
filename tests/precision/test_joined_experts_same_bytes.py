"""Checkpoints with all experts in one tensor: converter, weight sync, trainer and engine still hold the same bytes."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from miles_core.cli import main as cli
from miles_core.config.load import load
from miles_core.embedded.layout import Loader, export, views
from miles_core.embedded.model import load_model
from miles_core.errors import CheckpointError
from miles_core.precision.fused_experts import LAYOUTS
from miles_core.precision.installed import format_class, providers
from miles_core.precision.parity import real_layer
from miles_core.precision.projection import project
from miles_core.precision.select import codec_for
from miles_core.precision.train import install
from miles_core.sync.encode import Codec

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
    "llama4_text": transformers.Llama4TextConfig(**SIZES, intermediate_size_mlp=192),
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
        assert error < 1.2 * format_class(name).error, n
        assert (error > 0) == (tensor.dtype == torch.bfloat16), n


@pytest.mark.parametrize("name", FORMATS)
def test_experts_compute_with_the_codes_and_the_gradient_is_straight_through(checkpoint, name):
    codec = codec_for(format_class(name), load(["--rollout-precision", name, *OPTIONS.get(name, [])]), str(checkpoint))
    model, engine = load_model(checkpoint, "float32"), load_model(checkpoint, "float32")
    quantizer = install(model, codec)
    loader = Loader(engine)
    for encoded in codec.encode(export(model)):
        loader.put(encoded.name, codec.decode(encoded))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, WIDTH, generator=generator)
    path = "model.layers.1.mlp.experts" if checkpoint.name == "gpt_oss" else "model.layers.1.feed_forward.experts"
    outputs = []
    for m in (model, engine):
        experts = m.get_submodule(path)
        if m is engine:
            install(engine, codec).enabled = False
            experts = with_rounded_inputs(engine, codec).get_submodule(path)
        outputs.append(run_experts(experts, hidden))
    assert torch.equal(*outputs)
    del quantizer


def test_a_tensor_is_taken_apart_by_the_family_or_refused(checkpoint):
    model, codec = load_model(checkpoint, "float32"), Codec(format_class(FORMATS[0])())
    with pytest.raises(CheckpointError, match=r"experts\.\w+ .*holds all experts of a layer"):
        list(codec.encode(export(model)))  # nobody said whose experts these are
