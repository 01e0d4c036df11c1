"""Size of the states that layers keep between tokens (``model.states``), from ``config.json``. Does not import torch.

Counts a convolution's last inputs, in the dtype of the model, and a recurrent state, in float32, per layer and sequence: gated delta nets
(arXiv 2412.06464), Kimi's delta attention (arXiv 2510.26692), both versions of Mamba (arXiv 2312.00752 and 2405.21060), and short
convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StateSize:
    """Sizes of one layer that keeps a state.

    Attributes:
        convolution: elements of the convolution's last inputs, per sequence.
        recurrent: elements of the recurrent state, per sequence.
        parameters: parameters of the layer's matrices and convolution.
        attention_names: whether its matrices are called as those of an attention: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``.
    """

    convolution: int
    recurrent: int
    parameters: int
    attention_names: bool = False

    def bytes(self, width: int) -> int:
        """Bytes per sequence with a model dtype of ``width`` bytes."""
        return width * self.convolution + 4 * self.recurrent


def state_size(keys: Mapping[str, Any], hidden: int, heads: int) -> StateSize | None:
    """Compute the size of a layer with a state; None if the configuration has none of the known entries.

    Args:
        keys: the language model's entries of ``config.json``.
        hidden: width of the hidden states.
        heads: number of attention heads, the default of some entries.
    """

    def number(*names: str, default: int = 0) -> int:
        return next((int(v) for n in names if isinstance(v := keys.get(n), int)), default)

    if width := number("conv_L_cache"):
        return StateSize(hidden * width, 0, hidden * (4 * hidden + width))
    inner = keys.get("linear_attn_config")
    if isinstance(inner, Mapping) or "linear_num_heads" in keys or "short_conv_kernel_size" in keys:
        given = inner if isinstance(inner, Mapping) else {}
        count = int(given.get("num_heads") or number("linear_num_heads", default=heads))
        size = int(given.get("head_dim") or number("linear_head_dim", "head_dim", default=hidden // max(count, 1)))
        width = int(
            given.get("short_conv_kernel_size") or number("linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
        )
        return _kimi(hidden, count, size, width, full="short_conv_kernel_size" in keys)
    if "linear_conv_kernel_dim" in keys:
        keyed, valued = (number(f"linear_num_{x}_heads", default=heads) for x in ("key", "value"))
        key = number("linear_key_head_dim", default=3 * hidden // (4 * max(keyed, 1)))
        value = number("linear_value_head_dim", default=2 * key)
        separate = keys.get("model_type") == "olmo_hybrid"
        return _delta(hidden, keyed, key, valued, value, number("linear_conv_kernel_dim"), separate)
    state, width = (
        number("mamba_d_state", "ssm_state_size", "state_size"),
        number("mamba_d_conv", "conv_kernel", default=4),
    )
    if not state:
        return None
    expanded = number("mamba_expand", "expand", default=2) * hidden
    count = number("mamba_n_heads", "mamba_num_heads", "num_heads")
    if not count:
        rank = number("mamba_dt_rank", "time_step_rank", default=-(-hidden // 16))
        return _mamba(hidden, expanded, state, width, rank)
    size = number(
        "mamba_d_head", "mamba_head_dim", *(["head_dim"] if "num_heads" in keys else []), default=expanded // count
    )
    channels = number("mamba_d_ssm") or count * size
    return _mamba2(hidden, channels, count, state, number("mamba_n_groups", "n_groups", default=1), width)


def _kimi(hidden: int, heads: int, size: int, width: int, full: bool) -> StateSize:
    """Queries, keys, values and the output; two gates of low rank, or ``full`` ones; a scalar per head."""
    channels = heads * size
    gates = 2 * (hidden * channels if full else size * (hidden + channels)) + hidden * heads
    return StateSize(3 * channels * width, channels * size, 4 * hidden * channels + gates + 3 * channels * width, True)


def _delta(hidden: int, keyed: int, key: int, valued: int, value: int, width: int, separate: bool) -> StateSize:
    """Queries and keys of ``keyed`` heads; values, gate and output of ``valued`` heads, with two scalars per head. separate: one
    matrix for each."""
    channels = 2 * keyed * key + valued * value
    matrices = hidden * (channels + 2 * valued * value + 2 * valued)
    return StateSize(channels * width, valued * key * value, matrices + channels * width, separate)


def _mamba(hidden: int, inner: int, state: int, width: int, rank: int) -> StateSize:
    matrices = 3 * hidden * inner + inner * (2 * rank + 2 * state)
    return StateSize(inner * width, inner * state, matrices + inner * (width + state))


def _mamba2(hidden: int, inner: int, heads: int, state: int, groups: int, width: int) -> StateSize:
    channels = inner + 2 * groups * state
    matrices = hidden * (inner + channels + heads) + inner * hidden
    return StateSize(channels * width, inner * state, matrices + channels * width)
