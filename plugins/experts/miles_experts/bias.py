"""Load balancing without an auxiliary loss (Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

Some routers add a bias to each expert's score for the choice of the top k, and not to the weights. After each optimizer step the bias
of every expert changes by a fixed rate: it rises if the expert's load is below the mean of its layer, and falls if it is above.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from miles_core.plugin import PluginError
from miles_embedded import Routed, routed_blocks

#: Names of such a bias in Transformers' modules.
NAMES = ("e_score_correction_bias", "expert_bias")


def correction_biases(model: nn.Module) -> list[Tensor]:
    """Return the correction bias [experts] of each routed block in layer order, made FP32: a rate of 0.001 is lost in BF16.

    Raises:
        PluginError: a block has no such bias.
    """
    return [_bias_of(found) for found in routed_blocks(model)]


def _bias_of(found: Routed) -> Tensor:
    for module in found.block.modules():
        for name in NAMES:
            bias = getattr(module, name, None)
            if isinstance(bias, Tensor) and bias.numel() == found.count:
                delattr(module, name)  # some families declare it as a parameter, which ranks would divide
                module.register_buffer(name, bias.detach().float())
                found_bias: Tensor = getattr(module, name)
                return found_bias
    raise PluginError(
        f"--moe-router-bias-update-rate: {type(found.block).__name__} has no correction bias; use --aux-loss-coef"
    )


@torch.no_grad()
def update_biases(biases: Sequence[Tensor], loads: Sequence[Tensor], rate: float) -> None:
    """Change every bias by ``rate * sign(mean load - load)``.

    Args:
        biases: correction biases by layer.
        loads: [experts] tokens of each expert by layer.
        rate: size of the change.
    """
    for bias, load in zip(biases, loads, strict=True):
        bias += (rate * (load.mean() - load).sign()).to(bias).view_as(bias)
