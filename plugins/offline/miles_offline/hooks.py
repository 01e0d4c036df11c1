"""The plugin's hooks: no engine, the metrics of pairs, and the loss on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from miles_core.data import Batch, Sample
from miles_core.plugin import Policy, Run, hookimpl
from miles_core.trainer import Context, Learned, LearnerHandle, Loss, LossFunction, Output
from miles_offline.config import OfflineConfig
from miles_offline.pairs import CHOSEN, LOSS, REJECTED
from miles_offline.schedule import HELD_OUT


class Offline:
    """A run whose policies have no engines."""

    @hookimpl
    def on_start(self, run: Run) -> None:
        for policy in run.policies:
            policy.generates = False


class PairMetrics:
    """Reports the loss of pairs; the policy gradient's own value has no meaning."""

    @hookimpl
    def wrap_loss(self, run: Run, policy: Policy) -> Any:
        def wrap(inner: LossFunction) -> LossFunction:
            def loss(output: Output, batch: Batch, ctx: Context) -> Loss:
                found = inner(output, batch, ctx)
                if LOSS not in batch.scalars:
                    return found
                own, chosen, rejected = (batch.scalars[name] for name in (LOSS, CHOSEN, REJECTED))
                trained = torch.zeros_like(own).index_add(0, batch.owner, batch.mask.to(own)).clamp(max=1)
                count = trained.sum()
                values = {
                    "train/loss": own,
                    "offline/reward_chosen": chosen,
                    "offline/reward_rejected": rejected,
                    "offline/margin": chosen - rejected,
                    "offline/accuracy": (chosen > rejected).to(own),
                }
                pairs = {name: ((value * trained).sum(), count) for name, value in values.items()}
                # an estimate of the KL needs tokens that the policy sampled
                others = {name: pair for name, pair in found.metrics.items() if name != "train/ref_kl"}
                return Loss(found.value, others | pairs)

            return loss

        return wrap


class HeldOut:
    """Measures the loss on held-out rows: before the first step, every N steps and after the last."""

    def __init__(self, options: OfflineConfig) -> None:
        self.options = options

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Any:
        def wrap(inner: Any) -> Any:
            held_out, handle = run.state[HELD_OUT], handles[policy.name]
            by_length = run.config.algorithm.advantage_estimator == "ipo"

            async def learn(samples: Sequence[Sample], step: int) -> Learned:
                metrics: dict[str, float] = {}
                if step == 0:
                    first = await measure(handle, held_out, by_length)
                    metrics |= {f"{name}_first": value for name, value in first.items()}
                learned: Learned = await inner(samples, step)
                assert self.options.held_out_interval is not None
                if (step + 1) % self.options.held_out_interval == 0 or step + 1 == run.config.rollout.num_rollout:
                    metrics |= await measure(handle, held_out, by_length)
                return replace(learned, metrics={**learned.metrics, **metrics})

            return learn

        return wrap


async def measure(handle: LearnerHandle, samples: Sequence[Sample], by_length: bool) -> dict[str, float]:
    """Return the mean negative log-likelihood of the trained tokens, in nats; of preferences, that of the chosen texts, and the fraction of
    pairs whose chosen text has the larger log-ratio to the reference (with ``by_length`` per token)."""
    counts = [sum(sample.mask) for sample in samples]
    own = [float(each.sum(dtype=np.float64)) for each in await handle.log_probs(samples)]
    chosen = [number for number, sample in enumerate(samples) if sample.reward]
    metrics = {"offline/held_out_nll": -sum(own[i] for i in chosen) / sum(counts[i] for i in chosen)}
    if len(chosen) < len(samples):  # a rejected text follows its chosen one
        found = await handle.columns(samples, "ref", ("log_probs",))
        ratios = [a - float(b["log_probs"].sum(dtype=np.float64)) for a, b in zip(own, found, strict=True)]
        if by_length:
            ratios = [ratio / max(count, 1) for ratio, count in zip(ratios, counts, strict=True)]
        metrics["offline/held_out_accuracy"] = sum(ratios[i] > ratios[i + 1] for i in chosen) / len(chosen)
    return metrics
