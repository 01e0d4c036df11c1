"""A small number format for tests of core: eight bits, one scale per matrix, shared by gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from miles_core.plugin.manifest import Plugin
from miles_core.precision.format import Format, Parts, Stored, store

#: A manifest that installs the format in tests.
PLUGIN = Plugin("pair8", "eight bits", "0", "~=0.1", formats={"pair8": "miles_testing.doubles.pair_format:PairFormat"})


class PairFormat(Format):
    """Stored as ``X.weight_codes`` int16 [N, K/2] (two codes per word) and ``X.weight_range`` FP32 [1]."""

    name = "pair8"
    tile = (1, 2)
    couple = (("gate_proj", "up_proj"), ("w1", "w3"))
    error = 0.02
    skip_origin = "--pair8-skip-layers"

    def refuse(self, shape: tuple[int, int]) -> str | None:
        return None if shape[1] % 2 == 0 else f"K must be even: {shape[1] - 1} or {shape[1] + 1}, not {shape[1]}"

    def storage(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        rows, columns = shape
        return Stored("weight_codes", torch.int16, (rows, columns // 2)), Stored("weight_range", torch.float32, (1,))

    def stats(self, weight: Tensor) -> Tensor:
        return weight.float().abs().amax().reshape(1)

    def quantize(self, weight: Tensor, stats: Tensor | None = None, out: Parts | None = None) -> Parts:
        amax = self.stats(weight) if stats is None else stats
        codes = torch.round(weight.float() / amax.clamp(min=1e-30) * 127).to(torch.int8).contiguous()
        return store({"weight_codes": codes.view(torch.int16), "weight_range": amax.clone()}, out)

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["weight_codes"].view(torch.int8).float() * (parts["weight_range"] / 127)

    def config(self, unquantized: list[str]) -> dict[str, Any]:
        return {"quant_method": self.name, "ignore": list(unquantized)}

    def files(self, unquantized: list[str]) -> dict[str, dict[str, Any]]:
        return {"pair8.json": {"ignore": list(unquantized)}}
