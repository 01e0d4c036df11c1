"""The plugin's hooks: no engine, KTO's reference, the head of a reward model, the metrics of preferences, and the loss on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.data import Batch, Sample, WeightUnit
from miles_core.plugin import Policy, Run, hookimpl
from miles_core.trainer import Context, Learned, LearnerHandle, Loss, LossFunction, Output
from miles_offline import kto, pairs, reward_model
from miles_offline.classifier import as_classifier, make_classifier, output_name
from miles_offline.config import OfflineConfig
from miles_offline.encode import longest_text
from miles_offline.schedule import HELD_OUT


class Offline:
    """A run whose policies have no engines."""

    @hookimpl
    def on_start(self, run: Run) -> None:
        for policy in run.policies:
            policy.generates = False


class Kto:
    """Computes the reference of KTO before each step."""

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Any:
        def wrap(inner: Any) -> Any:
            async def learn(samples: Sequence[Sample], step: int) -> Learned:
                await kto.attach_reference(handles[policy.name], samples, longest_text(run))
                learned: Learned = await inner(samples, step)
                return learned

            return learn

        return wrap


class RewardModel:
    """Trains a score head in place of the output layer."""

    def __init__(self) -> None:
        #: policy -> name of the output layer's weight, in the process of the trainer
        self.outputs: dict[str, str] = {}

    @hookimpl
    def on_model(self, run: Run, policy: Policy, model: nn.Module, role: str) -> None:
        make_classifier(run, policy, model)
        self.outputs[policy.name] = output_name(model)

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Any:
        def wrap(inner: Any) -> Any:
            async def learn(samples: Sequence[Sample], step: int) -> Learned:
                await reward_model.attach_scores(handles[policy.name], samples)
                learned: Learned = await inner(samples, step)
                return learned

            return learn

        return wrap

    @hookimpl
    def wrap_loss(self, run: Run, policy: Policy) -> Any:
        def loss(output: Output, batch: Batch, ctx: Context) -> Loss:
            return with_metrics(reward_model.score_loss(output, batch, ctx), batch)

        return lambda inner: loss

    @hookimpl
    def wrap_weights(self, policy: Policy, purpose: str) -> Any:
        if purpose not in ("export", "convert"):
            return None

        def wrap(inner: Any) -> Any:
            def weights() -> Iterator[WeightUnit]:
                return as_classifier(inner(), self.outputs[policy.name])

            return weights

        return wrap


class PreferenceMetrics:
    """Reports the loss of preferences; the policy gradient's own value has no meaning."""

    @hookimpl
    def wrap_loss(self, run: Run, policy: Policy) -> Any:
        def wrap(inner: LossFunction) -> LossFunction:
            def loss(output: Output, batch: Batch, ctx: Context) -> Loss:
                return with_metrics(inner(output, batch, ctx), batch)

            return loss

        return wrap


def with_metrics(found: Loss, batch: Batch) -> Loss:
    """Return the loss with the metrics of the preferences in ``batch``, if it has any."""
    values = row_values(batch) if kto.LOSS in batch.scalars else pair_values(batch)
    if not values:
        return found
    own, _ = values["train/loss"]
    trained = torch.zeros_like(own).index_add(0, batch.owner, batch.mask.to(own)).clamp(max=1)
    means = {n: ((value * trained * of).sum(), (trained * of).sum()) for n, (value, of) in values.items()}
    # an estimate of the KL needs tokens that the policy sampled
    others = {name: pair for name, pair in found.metrics.items() if name != "train/ref_kl"}
    return Loss(found.value, others | means)


def pair_values(batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return metric -> values and their weights, [samples], of a batch of pairs; both samples have the values of the pair. Empty without pairs."""
    if pairs.LOSS not in batch.scalars:
        return {}
    own, chosen, rejected = (batch.scalars[name] for name in (pairs.LOSS, pairs.CHOSEN, pairs.REJECTED))
    values = {
        "train/loss": own,
        "offline/reward_chosen": chosen,
        "offline/reward_rejected": rejected,
        "offline/margin": chosen - rejected,
        "offline/accuracy": (chosen > rejected).to(own),
    }
    return {name: (value, torch.ones_like(own)) for name, value in values.items()}


def row_values(batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return metric -> values and their weights, [samples], of a batch of answers with labels."""
    own, reward, reference = (batch.scalars[name] for name in (kto.LOSS, kto.REWARD, kto.REFERENCE))
    good, every = batch.scalars["reward"].to(own), torch.ones_like(own)
    return {
        "train/loss": (own, every),
        "offline/reward_chosen": (reward, good),
        "offline/reward_rejected": (reward, 1 - good),
        "offline/reference": (reference, every),
    }


class HeldOut:
    """Measures the loss on held-out rows: before the first step, every N steps and after the last."""

    def __init__(self, options: OfflineConfig) -> None:
        self.options = options

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Any:
        def wrap(inner: Any) -> Any:
            held_out, handle = run.state[HELD_OUT], handles[policy.name]
            estimator = run.config.algorithm.advantage_estimator

            async def learn(samples: Sequence[Sample], step: int) -> Learned:
                metrics: dict[str, float] = {}
                if step == 0:
                    first = await measure(handle, held_out, estimator)
                    metrics |= {f"{name}_first": value for name, value in first.items()}
                learned: Learned = await inner(samples, step)
                assert self.options.held_out_interval is not None
                if (step + 1) % self.options.held_out_interval == 0 or step + 1 == run.config.rollout.num_rollout:
                    metrics |= await measure(handle, held_out, estimator)
                return replace(learned, metrics={**learned.metrics, **metrics})

            return learn

        return wrap


async def measure(handle: LearnerHandle, samples: Sequence[Sample], estimator: str) -> dict[str, float]:
    """Return the metrics of held-out samples.

    - ``offline/held_out_nll``: mean negative log-likelihood per trained token, in nats, without rejected and undesirable texts.
    - ``offline/held_out_accuracy``: see ``_accuracy``; absent in supervised training.

    ``reward_model`` has other metrics, see ``reward_model.measure``.
    """
    if estimator == "reward_model":
        return await reward_model.measure(handle, samples)
    totals = [float(each.sum(dtype=np.float64)) for each in await handle.log_probs(samples)]
    good = np.array([bool(sample.reward) for sample in samples])
    counts = np.array([sum(sample.mask) for sample in samples])
    metrics = {"offline/held_out_nll": float(-np.array(totals)[good].sum() / counts[good].sum())}
    if not good.all():
        reference = await handle.columns(samples, "ref", ("log_probs",))
        ratios = np.array(totals) - [columns["log_probs"].sum(dtype=np.float64) for columns in reference]
        if estimator == "ipo":
            ratios /= np.maximum(counts, 1)
        metrics["offline/held_out_accuracy"] = _accuracy(ratios, good, estimator)
    return metrics


def _accuracy(ratios: np.ndarray, good: np.ndarray, estimator: str) -> float:
    """Return the fraction of pairs whose better text has the larger log-ratio to the reference. For ``kto``, every desirable text forms a
    pair with every undesirable one.

    Args:
        ratios: [samples], per token for ``ipo``.
        good: [samples] bool, whether a text is chosen or desirable.
        estimator: ``--advantage-estimator``.
    """
    if estimator == "kto":
        return float((ratios[good][:, None] > ratios[~good]).mean())
    chosen = np.flatnonzero(good)  # a rejected text follows its chosen one
    return float((ratios[chosen] > ratios[chosen + 1]).mean())
