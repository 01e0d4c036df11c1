"""Reference of the trainer contract: a small batch, Transformers' own model in float64 one sample at a time, and an explicit AdamW.

The code is deliberately slow and simple.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context, Loss, Output, Trainer
from miles_core.data.batch import Batch, Ragged, collate
from miles_core.data.field import Field
from miles_core.data.sample import Sample

#: An input column that differs for every token, so no rows may be shared.
TAG = Field("tag", "int64", "token-1", pad=-1)


@dataclass(frozen=True)
class Setup:
    """Arguments of the factory. ``eps`` is large so that AdamW's first step does not amplify rounding of tiny gradients."""

    temperature: float = 0.8
    lr: float = 1e-2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-2
    clip_grad: float = 1.0
    micro_batch_size: int | None = 5
    max_tokens: int | None = None
    recompute: bool = False
    entropy: bool = False


def make_batch(tagged: bool = False) -> Batch:
    """Make the batch of ``TrainerContract.batch``; ``tagged`` adds the column ``tag``."""
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    for group, (prompt_length, count) in enumerate([(6, 4), (3, 3), (9, 4), (2, 1)]):
        prompt = random.integers(3, 60, prompt_length).tolist()
        for _ in range(count):
            length = int(random.integers(1, 12))
            tokens = prompt + random.integers(3, 60, length).tolist()
            mask = (random.random(length) < 0.8).astype(int).tolist()
            sample = Sample(
                tokens=tokens, response_length=length, loss_mask=mask, group_index=group, index=len(samples)
            )
            if tagged:
                sample.fields["tag"] = np.arange(len(tokens) - 1) + 1000 * len(samples)
            samples.append(sample)
    samples[5].remove_sample = True
    batch = collate(samples, [TAG] if tagged else [])
    batch.columns["weight"] = torch.from_numpy(random.normal(size=len(batch.tokens))).float()
    return batch


def weighted(output: Output, micro: Batch, ctx: Context) -> Loss:
    """Loss: the sum of log-probs times the column ``weight``."""
    assert output.log_probs is not None
    value = (output.log_probs * micro.column("weight").to(output.log_probs.device)).sum()
    return Loss(value, {"sum": (output.log_probs.detach().sum(), micro.mask.sum())})


def random_support(batch: Batch) -> Ragged:
    """Make supports with the token and random others, for all trained positions except every fifth; empty elsewhere."""
    random = np.random.default_rng(1)
    rows: list[list[int]] = []
    for t, (token, mask) in enumerate(zip(batch.tokens.tolist(), batch.mask.tolist(), strict=True)):
        others = [int(i) for i in random.choice(60, int(random.integers(0, 9)), replace=False) if i != token]
        rows.append([*others, token] if mask and t % 5 else [])
    offsets = torch.tensor([0, *np.cumsum([len(r) for r in rows])])
    return Ragged(torch.tensor([i for r in rows for i in r], dtype=torch.int32), offsets)


def yardstick_model(checkpoint: Path) -> nn.Module:
    """Load Transformers' own eager model in float64."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def yardstick(
    model: nn.Module, batch: Batch, temperature: float, support: Ragged | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropy [T] float64 at trained positions, computed one sample at a time."""
    log_probs, entropies = [], []
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        tokens = batch.tokens[start : start + length]
        logits = model(tokens[None]).logits[0, :-1] / temperature
        if support is not None:
            allowed = torch.zeros_like(logits, dtype=torch.bool)
            for t in range(1, length):
                ids = support.values[support.offsets[start + t] : support.offsets[start + t + 1]].long()
                allowed[t - 1, ids if len(ids) else slice(None)] = True
            logits = logits.masked_fill(~allowed, -1e30)
        every = logits.log_softmax(-1)
        first = every.new_zeros(1)
        log_probs.append(torch.cat([first, every.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([first, -(every.exp() * every).sum(-1)]))
    trained = batch.mask.double()
    return torch.cat(log_probs) * trained, torch.cat(entropies) * trained


@torch.no_grad()
def adamw(model: nn.Module, setup: Setup) -> float:
    """Apply the first step of AdamW with the gradients in ``model``; returns their norm before clipping."""
    moving = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(gradient.square().sum()) for _, gradient in moving))
    for parameter, gradient in moving:
        grad = gradient * min(1.0, setup.clip_grad / norm)
        decay = setup.weight_decay if parameter.dim() > 1 else 0.0
        parameter.mul_(1 - setup.lr * decay)
        # After one step the bias-corrected moments are the gradient and its square.
        parameter.sub_(setup.lr * grad / (grad.abs() + setup.eps))
    return norm


def checkpoint_weights(model: Any, checkpoint: Path) -> dict[str, Tensor]:
    """Return the model's tensors by checkpoint name, through Transformers' own ``save_pretrained``."""
    from safetensors.torch import load_file

    directory = checkpoint.parent / "yardstick"
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return checkpoint name -> tensor, as views of the trainer's memory."""
    return {n: t for unit in trainer.units() for n, t in unit.tensors.items()}


def copy_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return checkpoint name -> copy of the tensor."""
    return {n: t.clone() for n, t in weights(trainer).items()}


def find_needed(batch: Batch) -> set[int]:
    """Return the flat indices of the tokens that trained positions depend on."""
    found: set[int] = set()
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        trained = batch.mask[start : start + length].nonzero().flatten().tolist()
        found |= set(range(start, start + (trained[-1] if trained else 0)))
    return found


def position(batch: Batch, row: int) -> int:
    """Return the position of a flat index within its sample."""
    return row - int(batch.starts[int(batch.owner[row])])
