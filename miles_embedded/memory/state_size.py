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

    if width := _number(keys, "conv_L_cache"):  # short convolutions, as in LFM2
        return StateSize(hidden * width, 0, hidden * (4 * hidden + width))
    kimi = "linear_num_heads" in keys or "short_conv_kernel_size" in keys
    if kimi or isinstance(keys.get("linear_attn_config"), Mapping):
        return _read_kimi(keys, hidden, heads)
    if "linear_conv_kernel_dim" in keys:
        return _read_delta(keys, hidden, heads)
    return _read_mamba(keys, hidden)


def _number(keys: Mapping[str, Any], *names: str, default: int = 0) -> int:
    """Return the first of these entries that is an integer."""
    return next((int(v) for n in names if isinstance(v := keys.get(n), int)), default)


def _read_kimi(keys: Mapping[str, Any], hidden: int, heads: int) -> StateSize:
    """Kimi's delta attention: entries of ``linear_attn_config`` in Moonshot's checkpoints, of ``config.json`` itself in Transformers."""
    nested = keys.get("linear_attn_config")
    nested = nested if isinstance(nested, Mapping) else {}
    count = int(nested.get("num_heads") or _number(keys, "linear_num_heads", default=heads))
    default_size = hidden // max(count, 1)
    size = int(nested.get("head_dim") or _number(keys, "linear_head_dim", "head_dim", default=default_size))
    width = _number(keys, "linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    width = int(nested.get("short_conv_kernel_size") or width)
    return _kimi(hidden, count, size, width, full="short_conv_kernel_size" in keys)


def _read_delta(keys: Mapping[str, Any], hidden: int, heads: int) -> StateSize:
    keyed = _number(keys, "linear_num_key_heads", default=heads)
    valued = _number(keys, "linear_num_value_heads", default=heads)
    key = _number(keys, "linear_key_head_dim", default=3 * hidden // (4 * max(keyed, 1)))
    value = _number(keys, "linear_value_head_dim", default=2 * key)
    separate = keys.get("model_type") == "olmo_hybrid"
    return _delta(hidden, keyed, key, valued, value, _number(keys, "linear_conv_kernel_dim"), separate)


def _read_mamba(keys: Mapping[str, Any], hidden: int) -> StateSize | None:
    """Both versions of Mamba; only the second one has heads."""
    state = _number(keys, "mamba_d_state", "ssm_state_size", "state_size")
    if not state:
        return None
    width = _number(keys, "mamba_d_conv", "conv_kernel", default=4)
    inner = _number(keys, "mamba_expand", "expand", default=2) * hidden
    heads = _number(keys, "mamba_n_heads", "mamba_num_heads", "num_heads")
    if not heads:
        rank = _number(keys, "mamba_dt_rank", "time_step_rank", default=-(-hidden // 16))
        return _mamba(hidden, inner, state, width, rank)
    # without ``num_heads``, ``head_dim`` belongs to the attention layers
    names = ["mamba_d_head", "mamba_head_dim", *(["head_dim"] if "num_heads" in keys else [])]
    size = _number(keys, *names, default=inner // heads)
    channels = _number(keys, "mamba_d_ssm") or heads * size
    return _mamba2(hidden, channels, heads, state, _number(keys, "mamba_n_groups", "n_groups", default=1), width)


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
