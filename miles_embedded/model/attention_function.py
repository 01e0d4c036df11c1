"""The attention and mask functions registered in Transformers under the name ``miles``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.model.attention import attention_options, window_mask
from miles_embedded.model.call import Call
from miles_embedded.model.kv_dtype import KV_DTYPE, round_to_cache
from miles_embedded.model.operations import operations_of

_SWITCH = "attn_temperature_tuning"
#: Attribute that marks modules whose factor is applied here.
_TUNED = "miles_tuned"


def tune_by_position(attention: nn.Module) -> None:
    """Make ``scale_query`` scale the queries of this module, if it scales by position."""
    module: Any = attention
    if getattr(module, _SWITCH, False) and not module.use_rope:
        module.__dict__[_TUNED] = True
        module.register_forward_pre_hook(_switch, with_kwargs=True)


def scale_query(attention: nn.Module, query: Tensor, call: Call) -> Tensor:
    """Scale ``query`` [1, heads, rows, dim] by the factor of each row's position."""
    module: Any = attention
    if _TUNED not in module.__dict__:
        return query
    floor = torch.floor((call.positions.float() + 1.0) / module.floor_scale)
    factor = torch.log1p(floor) * module.attn_scale + 1.0
    return (query * factor[:, None]).to(query.dtype)


def _switch(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    module.__dict__[_SWITCH] = kwargs.get("call") is None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    call: Call | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer with its model's attention operation.

    Args:
        module: the layer's attention module.
        query: [1, heads, rows, dim].
        key: [1, kv heads, rows, dim].
        value: [1, kv heads, rows, value dim].
        attention_mask: the result of ``make_mask``.
        scaling: factor on the scores; None for 1 / sqrt(dim).
        call: the call that the rows belong to.
        kwargs: further arguments of the family.

    Returns:
        [1, rows, heads, value dim], and None in place of attention weights.
    """
    if call is None:
        raise RuntimeError("this model attends through a Call; pass call=... (see miles_embedded.model.call)")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if KV_DTYPE in call.ctx.attached:
        key, value = (round_to_cache(x, call.ctx.attached[KV_DTYPE]) for x in (key, value))
    query = scale_query(module, query, call)
    options = attention_options(module, attention_mask, kwargs)
    if options is not None:
        options = options.within(call.longest)
    out = operations_of(module).attention(call, module, query, key, value, scaling, options)
    return out.contiguous(), None  # contiguous as from Transformers' own functions: some families view the result


def make_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Mask function registered under the same name. A ``Call`` defines the mask except for the layer's window or chunk size."""
    return None if local_size is None else window_mask(local_size)
