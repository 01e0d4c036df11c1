"""``miles convert`` writes what SGLang 0.5.17's loader has parameters for (docs/decisions/0004-checkpoint-layouts.md)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from miles_core.cli import main as cli
from miles_formats.convert.installed import providers
from miles_testing.tiny import tiny_checkpoint

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 384,
    "head_dim": 64,
    "dtype": "bfloat16",
}
E4M3 = torch.float8_e4m3fn

#: format -> what a quantised matrix [n, k] is stored as: suffix -> (dtype, shape).
STORED = {
    "fp8": lambda n, k: {"weight": (E4M3, (n, k)), "weight_scale_inv": (torch.float32, (-(-n // 128), -(-k // 128)))},
    "mxfp8": lambda n, k: {"weight": (E4M3, (n, k)), "weight_scale_inv": (torch.uint8, (n, k // 32))},
    "nvfp4": lambda n, k: {
        "weight": (torch.uint8, (n, k // 2)),
        "weight_scale": (E4M3, (n, k // 16)),
        "weight_scale_2": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
    },
    "int4": lambda n, k: {
        "weight_packed": (torch.int32, (n, k // 8)),
        "weight_scale": (torch.bfloat16, (n, k // 128)),
        "weight_shape": (torch.int32, (2,)),  # copied into an int64 parameter
    },
}
#: format -> the words of ``quantization_config`` by which the loader knows it, and the name of its list of exceptions.
WORDS = {
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "modules_to_not_convert",
    ),
    "mxfp8": ({"quant_method": "mxfp8", "activation_scheme": "dynamic"}, "modules_to_not_convert"),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "ignore"),
    "int4": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "ignore"),
}


@pytest.mark.parametrize("name", STORED)
def test_every_matrix_is_in_the_layout_the_loader_reads_or_in_its_list_of_exceptions(tmp_path, name):
    if name not in providers():
        pytest.skip(f"{name} is not installed")
    source = tiny_checkpoint("qwen3_moe", tmp_path / "bf16", **SIZES)
    words = ["convert", "--to", name, "--model-dir", str(source), "--save-dir", str(tmp_path / "out")]
    assert cli.main([*words, "--num-layers-at-end-in-bf16", "1"]) == 0
    plain, found = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    says, exceptions = WORDS[name]
    assert says.items() <= block.items()

    expected, quantised = {}, set()
    for weight, tensor in plain.items():
        module = weight.removesuffix(".weight")
        linear = tensor.ndim == 2 and "embed_tokens" not in weight
        if linear and module not in block[exceptions]:
            quantised.add(module)
            expected |= {f"{module}.{s}": what for s, what in STORED[name](*tensor.shape).items()}
        else:
            expected[weight] = (torch.bfloat16, tuple(tensor.shape))
    assert {n: (t.dtype, tuple(t.shape)) for n, t in found.items()} == expected
    first = {m for m in quantised if ".layers.0.mlp.experts.0." in m}
    assert len(first) == 3 and not any(".layers.1." in m for m in quantised)


def test_int4_says_what_its_kernels_have_to_know(tmp_path):
    if "int4" not in providers():
        pytest.skip("int4 is not installed")
    source = tiny_checkpoint("qwen3", tmp_path / "bf16", **{k: v for k, v in SIZES.items() if "moe" not in k})
    words = ["convert", "--to", "int4", "--int4-group-size", "64", "--model-dir", str(source), "--save-dir"]
    assert cli.main([*words, str(tmp_path / "out")]) == 0
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = block["config_groups"].values()
    says = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    assert group["targets"] == ["Linear"] and says.items() <= group["weights"].items()
    assert not group.get("input_activations")
