"""Position-dependent scaling of queries, as in Llama 4's layers without a rotary embedding (arXiv 2501.19399).

Transformers counts positions from the first row of a call. Here a call contains several sequences, or the next tokens of many.
Therefore the module's own factor is disabled while it runs for a ``Call``, and each query is scaled by the factor of its position in
its sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.model.call import Call

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
