"""Mamba-2: Megatron-Core's mixer over packed samples, with the kernels of mamba-ssm or, without a GPU, torch."""

from __future__ import annotations

import itertools
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from miles_megatron.architecture import Architecture
from miles_megatron.trainer.attention import zigzag
from miles_megatron.trainer.scan import convolve_and_scan


class Mixer(MambaMixer):
    """Megatron-Core's mixer with the interface of attention.

    Args:
        config, submodules, layer_number, pg_collection: see ``MambaMixer``.
        epsilon: epsilon of the norm of the output.
        fixed: further arguments of ``MambaMixer``.
        arguments: arguments of attention, which have no meaning here.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        pg_collection: Any,
        epsilon: float,
        fixed: dict[str, Any],
        **arguments: Any,
    ) -> None:
        _replace_kernels()
        super().__init__(
            config,
            submodules,
            d_model=config.hidden_size,
            layer_number=layer_number,
            pg_collection=pg_collection,
            **fixed,
        )
        self.norm.eps = epsilon

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *, packed_seq_params: Any, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix [tokens of this rank, 1, hidden]. Every sample starts with an empty state."""
        if packed_seq_params.seq_idx is None:
            ranks = self.pg_collection.cp.size() * (self.tp_group.size() if self.config.sequence_parallel else 1)
            at = torch.arange(len(hidden_states) * ranks, device=hidden_states.device)
            ends = packed_seq_params.cu_seqlens_q[1:].to(at.device)
            packed_seq_params.seq_idx = torch.bucketize(at, ends, right=True).to(torch.int32)[None]
        found: tuple[Tensor, Tensor | None] = super().forward(hidden_states, packed_seq_params=packed_seq_params)
        return found


def mamba_spec(a: Architecture, attention: ModuleSpec) -> ModuleSpec:
    """Return the specification of a Mamba-2 mixer. attention: specification of attention, whose linear layers are used here too."""
    assert a.mamba is not None
    layers = attention.submodules
    return ModuleSpec(
        module=Mixer,
        submodules=MambaMixerSubmodules(layers.linear_qkv, layers.linear_proj),
        params={"epsilon": a.epsilon, "fixed": {"d_conv": a.mamba.width, "chunk_size": a.mamba.chunk}},
    )


class GroupNorm(nn.Module):
    """RMSNorm over groups of channels; replaces that of mamba-ssm, which Megatron-Core shards by channel.

    Args:
        channels: channels of this rank.
        eps: added to the mean square.
        group_size: channels of a group.
        fixed: device and dtype, and arguments that always have the same value.
    """

    def __init__(self, channels: int, eps: float, group_size: int, dtype: torch.dtype, **fixed: Any) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.tp_group: Any = None
        self.weight = nn.Parameter(torch.ones(channels, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., channels]."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normal = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normal.flatten(-2) * self.weight.float()).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the state for Megatron-Core's checkpoints; weights are sharded along the channels."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


@cache
def _replace_kernels() -> None:
    """Let Megatron-Core's mixer call torch if there is no GPU; the plan requires the kernels of mamba-ssm with one."""
    if torch.cuda.is_available():
        return
    mixer: Any = mamba_mixer
    mixer.HAVE_MAMBA_SSM, mixer.MAMBA_HAS_STATE_DTYPE = True, False
    mixer.ExtendedRMSNorm, mixer.mamba_split_conv1d_scan_combined = GroupNorm, convolve_and_scan
    mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)
    context: Any = mamba_context_parallel
    context.tex, context.is_te_min_version = (
        SimpleNamespace(thd_get_partitioned_indices=_find_rows),
        lambda version: True,
    )


def _find_rows(bounds: Tensor, tokens: int, ranks: int, rank: int) -> Tensor:
    """Return [tokens / ranks]: the rows of the packed row that a context-parallel rank holds; see TransformerEngine's function."""
    samples = itertools.pairwise(bounds.tolist())
    return torch.cat([start + zigzag((end - start) // ranks, rank, ranks) for start, end in samples]).to(torch.int32)
