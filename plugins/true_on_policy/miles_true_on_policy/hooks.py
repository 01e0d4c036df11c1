"""Hooks of the plugin: every forward of a model runs in ``mode.Invariant``."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.plugin import ConfigError, hookimpl
from miles_embedded import (
    Operations,
    backbone,
    decoder_layers,
    head,
    is_embedded,
    joined_layers,
    kernels_run,
    use_operations,
    uses_grouped_product,
    with_row_kernels,
)
from miles_true_on_policy.attention import attend
from miles_true_on_policy.log_probs import KernelLogProbs, log_probs, log_softmax, supported_log_probs
from miles_true_on_policy.mode import compute_inside, skip_mode
from miles_true_on_policy.products import check_tiles, multiply_groups


class TrueOnPolicy:
    """Makes the models of the embedded engine and trainer compute every row independently."""

    @hookimpl
    def on_model(self, model: nn.Module, role: str) -> None:
        if is_embedded(model):
            make_invariant(model)


def make_invariant(model: nn.Module) -> None:
    """Make the log-probabilities of a model independent of batch, packing, micro-batch and number of threads.

    Args:
        model: prepared by ``miles_embedded.load_model``.

    Raises:
        ConfigError: a product of the model's shapes depends on the number of rows on this machine, or kernels cannot run on its GPU.
    """
    check_device(head(model).weight.device)
    check_products(model)
    operations = make_operations(head(model).weight.device)
    if isinstance(operations.norm, RowNorm) and not sums_are_exact(model, operations.norm):
        operations = replace(operations, norm=operations.norm.alone)
    use_operations(model, operations)
    joined = {
        layer for layers in joined_layers(model) for layer in layers
    }  # their forward calls torch's product, which the mode replaces
    for module in model.modules():
        if type(module) is nn.Linear and module not in joined:
            module.__dict__.pop("forward", None)  # a product that depends on the number of rows
    # the parts of a layer too: recomputation in the backward pass calls them, but not the backbone
    parts = [part for layer in decoder_layers(model) for part in layer.children()]
    for module in (backbone(model), head(model), *parts):
        compute_inside(module)


def make_operations(device: torch.device) -> Operations:
    """Make the table of a model on ``device``. The model's own table is dropped: its kernels, and those of plugins, may choose an order by the
    number of rows."""
    table = Operations(
        attention=attend, log_softmax=log_softmax, log_probs=log_probs, supported_log_probs=supported_log_probs
    )
    if device.type != "cuda":
        return table
    fast = with_row_kernels(table)
    by_rows: Any = fast.experts
    grouped = skip_mode(partial(by_rows, multiply=multiply_groups))

    def experts(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        compute = grouped if uses_grouped_product(hidden, index, down) else by_rows
        found: Tensor = compute(hidden, index, weights, gate_up, down)
        return found

    assert fast.rotation is not None and fast.gate is not None
    by_tiles: Any = skip_mode(attend)
    by_tiles.static_prompts = True
    return replace(
        fast,
        norm=RowNorm(fast.norm),
        rotation=skip_mode(fast.rotation),
        gate=skip_mode(fast.gate),
        experts=experts,
        attention=by_tiles,
        log_probs=KernelLogProbs(),
    )


class RowNorm:
    """The kernel of a norm, and of a sum and its norm, outside the mode. Its parameters are those of ``Operations.norm``."""

    def __init__(self, norm: Any) -> None:
        self.alone, self.of_sum = skip_mode(norm), skip_mode(norm.of_sum)

    def __call__(self, x: Tensor, weight: Tensor, eps: float, epilogue: Any = None) -> Tensor:
        found: Tensor = self.alone(x, weight, eps, epilogue)
        return found


@torch.no_grad()
def sums_are_exact(model: nn.Module, norm: RowNorm) -> bool:
    """Whether the norm of a sum has the bits of the norm alone, which recomputed layers use, for every norm of the model."""
    norms = (module for module in model.modules() if type(module).__name__.endswith("RMSNorm"))
    weights = [weight for each in norms if isinstance(weight := getattr(each, "weight", None), Tensor)]
    generator = torch.Generator().manual_seed(0)
    for width, dtype, device in {(len(weight), weight.dtype, weight.device) for weight in weights}:
        rows = torch.randn(3, 70, width, generator=generator).to(device, dtype)
        weight = torch.randn(width, generator=generator).to(device, dtype)
        total, found = norm.of_sum(rows[0], rows[1], weight, 1e-6)
        if not torch.equal(norm(total, weight, 1e-6), found):
            return False
    return True


def check_device(device: torch.device) -> None:
    """ConfigError if ``device`` is a GPU on which Triton cannot run."""
    if device.type == "cuda" and not kernels_run(device):
        raise ConfigError(
            "--true-on-policy-mode computes with Triton kernels on a GPU, and Triton cannot run here (the log says why); install it, or give "
            "--device cpu"
        )


def check_products(model: nn.Module) -> None:
    """Check that no row of a matrix product depends on other rows, for each matrix of the model and for joined layers.

    Raises:
        ConfigError: a product depends on the number of rows; names the matrix.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    matrices = [
        (name, *weight.shape[-2:], weight) for name, weight in model.named_parameters() if weight.dim() in (2, 3)
    ]
    for layers in joined_layers(model):
        first, columns = layers[0].weight, sum(layer.out_features for layer in layers)
        matrices.append((f"{names[id(first)]} and its siblings", columns, first.shape[1], first))
    for name, columns, inner, weight in matrices:
        if not weight.is_floating_point() or weight.device.type == "meta":
            continue
        if not has_exact_rows(columns, inner, weight.dtype, weight.device):
            raise ConfigError(
                f"--true-on-policy-mode: the product with {name} ({columns} x {inner}, {str(weight.dtype).removeprefix('torch.')}) depends "
                f"on the number of rows or threads with this machine's libraries (PyTorch {torch.__version__}); try another --dtype, or leave "
                "the flag out"
            )


has_exact_rows = cache(check_tiles)
