"""Builds a trainer without a run, for tests on a CPU."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miles_core.trainer import MtpRequest, OptimizerConfig
from miles_formats import Codec
from miles_megatron import families
from miles_megatron.sizes import Sizes
from miles_testing import Setup

if TYPE_CHECKING:
    from miles_megatron.trainer.settings import Settings
    from miles_megatron.trainer.trainer import MegatronTrainer


def make(
    checkpoint: str | Path,
    setup: Setup,
    balance: float = 0.0,
    codec: Codec | None = None,
    mtp: MtpRequest | None = None,
    dtype: torch.dtype = torch.float32,
    on_chunk: Callable[[Any], object] = lambda chunk: None,
    **sizes: Any,
) -> MegatronTrainer:
    """Build one rank of a trainer with the contract's settings; all processes of torch.distributed are ranks.

    Args:
        checkpoint: checkpoint of the model and of the reference model.
        setup: see ``TrainerContract``.
        balance: coefficient of the load-balancing loss.
        codec: codec of the number format.
        mtp: how to train the MTP layer.
        dtype: dtype of parameters and activations.
        on_chunk: called with each chunk, as plugins receive it.
        sizes: fields of ``Sizes``.
    """
    from miles_megatron.trainer.groups import start_groups
    from miles_megatron.trainer.without_cuda import adapt_modules, without_cuda

    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    s = Sizes(**{"ranks": ranks, "etp": sizes.get("tp", 1), **sizes})
    with without_cuda():
        world = start_groups(s, 0)
        adapt_modules()
        from miles_megatron.trainer.trainer import MegatronTrainer

        path = Path(checkpoint)
        a = families.read(json.loads((path / "config.json").read_text()))
        settings = _make_settings(setup, balance, dtype)
        return MegatronTrainer(a, s, world, path, settings, path, on_chunk, codec, mtp)


def _make_settings(setup: Setup, balance: float, dtype: torch.dtype) -> Settings:
    from miles_megatron.trainer.build import FULL_RECOMPUTATION
    from miles_megatron.trainer.settings import Settings

    adamw = OptimizerConfig(
        setup.lr,
        weight_decay=setup.weight_decay,
        betas=setup.betas,
        eps=setup.eps,
        clip_grad=setup.clip_grad,
    )
    return Settings(
        adamw=adamw,
        temperature=setup.temperature,
        micro_batch_size=setup.micro_batch_size,
        max_tokens=setup.max_tokens,
        entropy=setup.entropy,
        balance=balance,
        dtype=dtype,
        longest=128,
        model=FULL_RECOMPUTATION if setup.recompute else {},
    )


def may_have_children() -> None:
    """Allow this process to start children: Megatron-Core saves checkpoints in a child process, and the ranks of the fixture ``ranks``
    are daemons, which must not have children."""
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
