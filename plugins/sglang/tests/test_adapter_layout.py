"""Adapters of joined experts in SGLang's layout: the numbers of peft's, per expert; and where the plan refuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from miles_core.plugin import MilesError, PlanError
from miles_sglang.adapter_layout import convert
from miles_sglang.adapters import adapter_arguments
from miles_testing import plan

MODULE, EXPERTS, RANK = "base_model.model.model.layers.1.mlp.experts", 3, 2
CONFIG = {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": False}


def adapters(names: list[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a configuration and tensors as peft saves them, and the change of each parameter."""
    miles_lora = pytest.importorskip("miles_lora.adapter")
    tensors, deltas = {"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": torch.ones(RANK, 5)}, {}
    for depth, name in enumerate(reversed(names)):
        adapter = miles_lora.Adapter(
            torch.zeros(EXPERTS, 6, 5), pytest.importorskip("miles_lora").LoraOptions(rank=RANK)
        )
        for letter, matrix in zip("AB", adapter.parameters(), strict=True):
            matrix.data = torch.randn(matrix.shape)
            tensors[f"{MODULE}.{'base_layer.' * depth}lora_{letter}.weight"] = matrix.data
        deltas[name] = adapter(torch.zeros(EXPERTS, 6, 5)).detach()
    config = {**CONFIG, "lora_alpha": 16, "target_parameters": [f"mlp.experts.{name}" for name in names]}
    return config, tensors, deltas


@pytest.mark.parametrize("names", [["gate_up_proj", "down_proj"], ["down_proj"]])
def test_each_expert_has_the_adapter_that_peft_applies(names: list[str]) -> None:
    config, tensors, deltas = adapters(names)
    converted, data = convert(config, save(tensors))
    found = load(data)
    assert converted["target_modules"] == ["q_proj", *names] and converted["target_parameters"] is None
    scale = converted["lora_alpha"] / converted["r"]
    for name in names:
        for expert in range(EXPERTS):
            start = f"{MODULE}.{expert}.{name}.lora_"
            a, b = found.pop(f"{start}A.weight"), found.pop(f"{start}B.weight")
            torch.testing.assert_close(scale * b @ a, deltas[name][expert])
    assert list(found) == ["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]


def test_an_adapter_without_experts_stays_as_it_is() -> None:
    assert convert(CONFIG, b"tensors") == (CONFIG, b"tensors")


def test_the_scale_of_rank_stabilised_adapters_is_put_into_alpha() -> None:
    """SGLang divides alpha by the rank and does not read ``use_rslora``."""
    converted, _ = convert({**CONFIG, "r": 16, "use_rslora": True}, b"")
    assert converted["lora_alpha"] / converted["r"] == pytest.approx(8 / 4)


def test_a_parameter_that_sglang_does_not_adapt_is_refused() -> None:
    with pytest.raises(MilesError, match="this adapter has one of input_linear"):
        convert({**CONFIG, "target_parameters": ["experts.input_linear"]}, b"")


def test_sglang_gets_both_layers_of_experts_as_targets() -> None:
    lora = pytest.importorskip("miles_lora")
    options = [lora.LoraOptions(target_modules=names) for names in (("q_proj",), ("all-experts",))]
    assert adapter_arguments(options, experts=True)["lora_target_modules"] == ["down_proj", "gate_up_proj", "q_proj"]
    assert adapter_arguments(options[:1])["lora_target_modules"] == ["q_proj"]


EXPERT_RUN = {"plugins": ["lora"], "engine": "sglang", "lora_sync": "adapter", "facts": ("gpu.count=1",)}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "cpu"}, "written in Triton for GPUs"),
        ({"lora_target_modules": "experts.other"}, "adapts the experts' gate_up_proj and down_proj only"),
        ({"sglang_moe_runner_backend": "deep_gemm"}, "triton and marlin add adapters"),
        ({"sglang_moe_a2a_backend": "deepep"}, "these dispatchers pass tokens to runners that add no adapters"),
        ({"family": "gpt_oss"}, "gate and up of these experts in turns"),
    ],
)
def test_the_plan_says_why_sglang_adds_no_adapters_of_experts(options: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=f"(?s)adapters of joined experts that SGLang 0.5.17 can add.*{why}"):
        plan(**{**EXPERT_RUN, "lora_target_modules": "all-experts", **options})
