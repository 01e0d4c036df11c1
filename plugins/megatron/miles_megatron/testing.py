"""Builds a trainer without a run, for tests on a CPU."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miles_core.data import Batch, Sample, collate
from miles_core.trainer import Callbacks, Context, Loss, MtpRequest, OptimizerConfig, Output
from miles_formats import Codec
from miles_megatron import families
from miles_megatron.sizes import Sizes
from miles_testing import Setup, TrainerContract

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


class MegatronContract(TrainerContract):
    """The trainer's contract for one rank."""

    def make(self, checkpoint: Path, setup: Setup) -> MegatronTrainer:
        return make(checkpoint, setup)

    def all_layers(self, trainer: Any) -> list[Any]:
        return [m for chunk in trainer.chunks for m in chunk.modules() if type(m).__name__ == "TransformerLayer"]


def draw_neighbours(seed: int) -> Batch:
    """Return a batch of three samples with weights of tokens (column ``weight``). The second sample is the same for all seeds, and only its tokens
    have weights."""
    others, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, 60, (n,), generator=g).tolist() for n, g in ((9, others), (12, own), (7, others))]
    batch = collate([Sample(tokens=t, response_length=len(t) - 1, index=i) for i, t in enumerate(tokens)])
    weights = batch.columns["weight"] = torch.zeros(len(batch.tokens))
    weights[9:21] = torch.randn(12, generator=own)
    return batch


def collect_gradients(checkpoint: Path, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the gradients of the weighted sum of log-probs by the checkpoint's names, and the log-probs."""
    from miles_megatron.layout import join

    trainer = make(checkpoint, Setup(micro_batch_size=None))
    found: dict[str, torch.Tensor] = {}

    def weigh(output: Output, micro: Batch, ctx: Context) -> Loss:
        assert output.log_probs is not None
        return Loss((output.log_probs * micro.column("weight")).sum())

    def collect() -> dict[str, float]:
        for entry in trainer.weights.entries:
            grad = getattr(trainer.weights.held[entry.name], "main_grad", None)  # a router's correction is a buffer
            if grad is not None:
                found.update(zip(entry.checkpoint, join(entry, [grad.clone()], trainer.a), strict=True))
        return {"grad_norm": 0.0}

    trainer.bind(Callbacks(trainer.forward, weigh, collect))
    log_probs = trainer.log_probs(batch, "old")["log_probs"]
    trainer.step(batch)
    return found, log_probs


def may_have_children() -> None:
    """Allow this process to start children: Megatron-Core saves checkpoints in a child process, and the ranks of the fixture ``ranks``
    are daemons, which must not have children."""
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
