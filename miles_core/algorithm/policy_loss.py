"""Policy losses per token, before any reduction.

Token losses are not weighted here: corrections multiply them, ``reduction.loss_weights`` weights them, and their sum over all
micro-batches and ranks is the loss of the optimiser step. With r_t = exp(log pi - log pi_old):

- ``ppo``:   max(-A r, -A clip(r, 1 - eps, 1 + eps_high)); dual clip: for A < 0 at most -c A. Also the loss of GRPO,
  Dr.GRPO, RLOO, DAPO and the REINFORCE++ family. (arXiv 1707.06347; dual clip 1912.09729)
- ``gspo``:  the same with one ratio per sequence, s = exp(mean_t log r_t), gradient through the mean. (2507.18071)
- ``cispo``: -sg[min(r, 1 + eps_high)] A log pi: clipped above only, so every token keeps a gradient. (2506.13585)

Masked tokens have loss 0 and gradient 0 regardless of their log-probabilities. Log-ratios are clamped to +-20 before exp, so that a
single token cannot make the step infinite; a clamped log-ratio has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.algorithm.kl import LOG_RATIO_CLAMP
from miles_core.algorithm.ragged import segment_sum
from miles_core.algorithm.reduction import masked_sum
from miles_core.errors import ConfigError

Metrics = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Clip:
    """The trust region: ratios in [1 - eps, 1 + eps_high]; ``dual`` is c > 1 or None; eps_high None means eps."""

    eps: float = 0.2
    eps_high: float | None = None
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise ConfigError(f"--eps-clip {self.eps:g} is negative; give a value >= 0, for example 0.2")
        if self.eps_high is not None and self.eps_high < 0:
            raise ConfigError(f"--eps-clip-high {self.eps_high:g} is negative; give a value >= 0, for example 0.28")
        if self.dual is not None and self.dual <= 1:
            raise ConfigError(f"--eps-clip-c {self.dual:g} must be greater than 1 (3 is usual)")

    @property
    def low(self) -> float:
        """The smallest ratio, 1 - eps."""
        return 1.0 - self.eps

    @property
    def high(self) -> float:
        """The largest ratio, 1 + eps_high."""
        return 1.0 + (self.eps if self.eps_high is None else self.eps_high)


@dataclass(frozen=True)
class PolicyLossInputs:
    """The tokens of one micro-batch; every column is [tokens].

    Attributes:
        log_probs: log pi of the current policy, with gradient.
        old_log_probs: log pi_old, no gradient.
        advantages: A.
        mask: nonzero for trained tokens.
        segments: int64, non-decreasing, index of the sample of each token. ``gspo`` needs it, and needs complete samples in the
            micro-batch (masked tokens may be omitted).
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    segments: Tensor | None = None


def ppo(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
    """Compute the clipped surrogate with a ratio per token: ([tokens] loss, metrics as (sum, count))."""
    log_ratio = _log_ratio(inputs)
    ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return _clip(ratio, log_ratio, inputs, clip)


def gspo(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
    """Compute the clipped surrogate with one ratio per sequence, exp of the mean log-ratio over its unmasked tokens."""
    log_ratio = _log_ratio(inputs)
    mean = _segment_mean(log_ratio, inputs)
    ratio = mean.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return _clip(ratio, log_ratio, inputs, clip)


def cispo(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
    """Compute the policy gradient loss weighted by the detached ratio, which is clipped above only."""
    mask = inputs.mask.bool()
    log_ratio = _log_ratio(inputs)
    ratio = log_ratio.detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    advantages = torch.where(mask, inputs.advantages.detach(), 0.0).to(ratio.dtype)
    log_probs = torch.where(mask, inputs.log_probs, 0.0)
    loss = -ratio.clamp(max=clip.high) * advantages * log_probs
    metrics = _ratio_metrics(ratio, log_ratio, mask)
    metrics["clip_fraction_high"] = _fraction(ratio > clip.high, mask)
    return loss, metrics


def token_objective(
    policy: Tensor,
    kl: Tensor | None = None,
    kl_loss_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> Tensor:
    """Compute policy + kl_loss_coef kl - entropy_coef entropy, per token [tokens].

    ``policy`` is the token loss after corrections: a correction weights only the policy gradient, not KL and entropy. A nonzero
    coefficient requires its column; ValueError without it.
    """
    total = policy
    if kl_loss_coef:
        if kl is None:
            raise ValueError(f"kl_loss_coef is {kl_loss_coef:g} but there is no KL column")
        total = total + kl_loss_coef * kl
    if entropy_coef:
        if entropy is None:
            raise ValueError(f"entropy_coef is {entropy_coef:g} but there is no entropy column")
        total = total - entropy_coef * entropy
    return total


def _log_ratio(inputs: PolicyLossInputs) -> Tensor:
    """Compute log pi - log pi_old, with 0 for masked tokens, so that their -inf or NaN affects neither value nor gradient."""
    mask = inputs.mask.bool()
    current = torch.where(mask, inputs.log_probs, 0.0)
    old = torch.where(mask, inputs.old_log_probs.detach(), 0.0)
    return current - old


def _segment_mean(values: Tensor, inputs: PolicyLossInputs) -> Tensor:
    if inputs.segments is None:
        raise ValueError("gspo needs PolicyLossInputs.segments: which sample each token belongs to")
    segments = inputs.segments
    if len(segments) == 0:
        return values
    if bool((segments.diff() < 0).any()):
        raise ValueError("PolicyLossInputs.segments must be non-decreasing")
    lengths = torch.bincount(segments)
    counts = segment_sum(inputs.mask.bool().double(), lengths).clamp(min=1.0)
    return (segment_sum(values, lengths) / counts)[segments].to(values.dtype)


def _clip(ratio: Tensor, log_ratio: Tensor, inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
    mask = inputs.mask.bool()
    advantages = torch.where(mask, inputs.advantages.detach(), 0.0).to(ratio.dtype)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(clip.low, clip.high)
    loss = torch.maximum(plain, bounded)
    metrics = _ratio_metrics(ratio.detach(), log_ratio, mask)
    metrics["clip_fraction_low"] = _fraction((ratio < clip.low) & (advantages < 0), mask)
    metrics["clip_fraction_high"] = _fraction((ratio > clip.high) & (advantages > 0), mask)
    if clip.dual is not None:
        ceiling = -clip.dual * advantages
        beyond = (advantages < 0) & (loss > ceiling)
        metrics["clip_fraction_dual"] = _fraction(beyond, mask)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return torch.where(mask, loss, 0.0), metrics


def _ratio_metrics(ratio: Tensor, log_ratio: Tensor, mask: Tensor) -> Metrics:
    """Return k1 and k3 estimates of KL(pi_old || pi) on tokens sampled from pi_old, and the mean distance of the ratio from 1."""
    with torch.no_grad():
        bounded = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        return {
            "approx_kl": masked_sum(-log_ratio, mask),
            "approx_kl_k3": masked_sum(torch.expm1(bounded) - bounded, mask),
            "ratio": masked_sum(ratio, mask),
            "ratio_deviation": masked_sum((ratio - 1.0).abs(), mask),
        }


def _fraction(condition: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return (condition & mask).sum(), mask.sum()


#: A policy loss: ([tokens] loss, metrics as (sum, count)).
TokenLoss = Callable[[PolicyLossInputs, Clip], tuple[Tensor, Metrics]]

POLICY_LOSSES: dict[str, TokenLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
}


def policy_loss_of(estimator: str) -> TokenLoss:
    """Return the policy loss for ``--advantage-estimator``: the loss with the same name, or PPO's clipped loss."""
    return POLICY_LOSSES.get(estimator, ppo)
