"""What Transformers' attention modules call: the functions registered under the name ``miles``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.model.attention import attention_options, window_mask
from miles_embedded.model.call import Call
from miles_embedded.model.kv_dtype import KV_DTYPE, as_cached
from miles_embedded.model.operations import operations_of
from miles_embedded.model.temperature import tuned


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
    """The attention of one layer, by the operation of its model's table.

    Args:
        module: the layer's attention.
        query: [1, heads, rows, dim].
        key: [1, kv heads, rows, dim].
        value: [1, kv heads, rows, value dim].
        attention_mask: what ``no_mask`` returned.
        scaling: of the scores; None is 1 / sqrt(dim).
        call: whom the rows belong to.
        kwargs: what else the family passes.

    Returns:
        [1, rows, heads, value dim], and no weights.
    """
    if call is None:
        raise RuntimeError("this model attends through a Call; pass call=... (see miles_embedded.model.call)")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if KV_DTYPE in call.ctx.attached:
        key, value = (as_cached(x, call.ctx.attached[KV_DTYPE]) for x in (key, value))
    query = tuned(module, query, call)
    options = attention_options(module, attention_mask, kwargs)
    if options is not None:
        options = options.within(call.longest)
    out = operations_of(module).attention(call, module, query, key, value, scaling, options)
    return out.contiguous(), None  # as Transformers' own functions do, whose result some families view


def no_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask function registered under the same name: a Call knows who sees whom, but not how wide a layer's window or chunk is."""
    return None if local_size is None else window_mask(local_size)
