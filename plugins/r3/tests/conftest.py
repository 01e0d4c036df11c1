"""One block of a tiny model, of every family with a router that Transformers knows; Triton on a GPU, or its interpreter."""

import os
import sys
from dataclasses import replace

import pytest
import torch
import transformers

from miles_core.trainer import Context
from miles_embedded import operations_of, use_operations
from miles_embedded.model import call as calls
from miles_r3 import ROUTES
from miles_testing.tiny import FAMILIES, ROUTER_FAMILIES

ROWS = 48

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, as loading a model does


@pytest.fixture(scope="session")
def triton():
    if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton was imported without its interpreter")
    return pytest.importorskip("triton")


def make_block(family, deterministic=False, dtype=torch.float32, route=None, device="cpu"):
    """The last mixture-of-experts block of a tapped tiny model, and ``run(kind, routes) -> Context`` through it alone.

    Its routers compute their choice with the operation ``route`` if one is given."""
    from miles_embedded.model.load import NAME
    from miles_r3.embedded import LAYERS, RECORDED, REPLAY, moe_blocks, tap

    name, values = (FAMILIES | ROUTER_FAMILIES)[family]
    values = values | ({"n_routed_experts": 8} if "n_routed_experts" in values else {})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**values), dtype=dtype, attn_implementation=NAME, experts_implementation=NAME
    ).eval()
    with torch.no_grad():
        for parameter_name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if parameter.ndim > 1 or "correction_bias" in parameter_name:
                parameter.normal_(std=0.3)
    model.to(device)
    if route is not None:
        use_operations(model, replace(operations_of(model), route=route))
    tap(model, deterministic)
    blocks = moe_blocks(model)
    block = blocks[-1]
    hidden = torch.randn(1, ROWS, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def run(kind, routes=None):
        ctx = Context(kind, (0, 1), torch.arange(ROWS))
        if routes is not None:
            ctx.attached[REPLAY] = routes[:, None].expand(-1, len(blocks), -1)
            ctx.attached[RECORDED] = torch.ones(ROWS, dtype=torch.bool)
        calls._active.ctx = ctx
        try:
            output = block(hidden)
        finally:
            calls._active.ctx = None
        ctx.attached["output"] = output[0] if isinstance(output, tuple) else output
        if kind == "rollout":
            whole = ctx.extras.get(ROUTES.name)  # without the other blocks' choices only if this is the only block
            ctx.extras[ROUTES.name] = ctx.attached[LAYERS][len(blocks) - 1] if whole is None else whole[:, -1]
        return ctx

    return block, run


@pytest.fixture
def block_with_call():
    return make_block
