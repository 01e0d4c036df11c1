"""The trainer alone, without a run, for tests on a CPU."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miles_core.format import Codec
from miles_core.trainer import FurtherLayer, OptimizerConfig
from miles_megatron import families
from miles_megatron.sizes import Sizes
from miles_testing import Setup

if TYPE_CHECKING:
    from miles_megatron.trainer.trainer import MegatronTrainer


def make(
    checkpoint: str | Path,
    setup: Setup,
    balance: float = 0.0,
    codec: Codec | None = None,
    further: FurtherLayer | None = None,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> MegatronTrainer:
    """A trainer with the contract's settings, one rank of as many as there are processes.

    Args:
        checkpoint: the model, and the reference.
        setup: see ``TrainerContract``.
        balance: coefficient of the load-balancing loss.
        codec: of the number format.
        further: how to train the MTP layer.
        dtype: of parameters and activations.
        sizes: fields of ``Sizes``.
    """
    from miles_megatron.trainer.build import FULL_RECOMPUTATION
    from miles_megatron.trainer.groups import start_groups
    from miles_megatron.trainer.without_cuda import adapt_modules, without_cuda

    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    s = Sizes(**{"ranks": ranks, "etp": sizes.get("tp", 1), **sizes})
    with without_cuda():
        world = start_groups(s, 0)
        adapt_modules()
        from miles_megatron.trainer.trainer import MegatronTrainer, Settings

        settings = Settings(
            adamw=OptimizerConfig(
                setup.lr,
                weight_decay=setup.weight_decay,
                betas=setup.betas,
                eps=setup.eps,
                clip_grad=setup.clip_grad,
            ),
            temperature=setup.temperature,
            micro_batch_size=setup.micro_batch_size,
            max_tokens=setup.max_tokens,
            entropy=setup.entropy,
            balance=balance,
            dtype=dtype,
            longest=128,
            model=FULL_RECOMPUTATION if setup.recompute else {},
        )
        a = families.read(json.loads((Path(checkpoint) / "config.json").read_text()))
        path = Path(checkpoint)
        return MegatronTrainer(a, s, world, path, settings, path, codec=codec, further=further)


def may_have_children() -> None:
    """Megatron-Core writes checkpoints with a process beside, which the processes of the fixture ``ranks`` may not start otherwise."""
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
