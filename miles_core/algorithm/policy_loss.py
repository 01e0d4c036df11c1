"""Policy losses per token, estimators of the KL divergence, and the reduction to the loss of an optimiser step.

Token losses are not weighted: corrections multiply them, ``loss_weights`` weights them, and their sum over all
micro-batches and ranks is the loss of the optimiser step. With r_t = exp(log pi - log pi_old):

- ``ppo``:   max(-A r, -A clip(r, 1 - eps, 1 + eps_high)); dual clip: for A < 0 at most -c A. Also the loss of GRPO,
  Dr.GRPO, RLOO, DAPO and the REINFORCE++ family. (arXiv 1707.06347; dual clip 1912.09729)
- ``gspo``:  the same with one ratio per sequence, s = exp(mean_t log r_t), gradient through the mean. (2507.18071)
- ``cispo``: -sg[min(r, 1 + eps_high)] A log pi: clipped above only, so every token keeps a gradient. (2506.13585)

Masked tokens have loss 0 and gradient 0 regardless of their log-probabilities. Log-ratios are clamped to +-20 before exp, so that a
single token cannot make the step infinite; a clamped log-ratio has no gradient.

**KL.** Estimators of KL(pi || pi_ref) from tokens sampled from pi (J. Schulman, "Approximating KL divergence", 2020).

With d = log pi - log pi_ref: k1 = d is unbiased with high variance; k2 = d^2 / 2 is biased, and its gradient is the
unbiased one of the reverse KL; k3 = e^-d - 1 + d is unbiased as a value and never negative; low_var_kl is k3 with
clamps. As a *loss*, k1 has a gradient with mean 0, and the gradient of k3 is not that of the reverse KL.

**Reduction.** A weight per token, computed before the first micro-batch from all local tokens of the step. The step's loss is then
``(token_loss * weight).sum()``, summed over micro-batches and ranks. It does not depend on how the batch was split or packed, and
gradients are summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.algorithm.advantage import local_sum
from miles_core.data.batch import expand, mask_counts, segment_sum
from miles_core.errors import ConfigError

REDUCTIONS = ("rollout_mean", "token_mean", "constant")


def loss_weights(
    mask: Tensor,
    lengths: Tensor,
    rollout_ids: Tensor,
    how: str = "rollout_mean",
    constant_length: int | None = None,
    sum: Callable[[Tensor], Tensor] = local_sum,
) -> Tensor:
    """Compute the weight of every token in the step's loss, float32 [tokens]; masked tokens have weight 0.

    - ``rollout_mean``: mask / (mask sum of the token's rollout * rollouts of the step).
    - ``token_mean``: mask / (mask sum of the step).
    - ``constant``: mask / (constant_length * rollouts of the step), Dr.GRPO (arXiv 2503.20783).

    Siblings (samples with the same rollout id) count as one rollout. A completely masked rollout contributes no loss but counts in the
    number of rollouts, so masking it never increases the weight of others. The same holds for tokens that a correction rejects, because
    ``mask`` is the original mask. Without any unmasked token all weights are 0.

    Args:
        mask: [tokens] flat column of all local samples of the step.
        lengths: [samples] int64.
        rollout_ids: [samples] int64. Siblings must be on one rank; ids must not repeat between ranks.
        how: one of ``REDUCTIONS``.
        constant_length: length in tokens for ``constant``; usually the maximum response length.
        sum: sums a tensor over the ranks of the step.
    """
    if how not in REDUCTIONS:
        raise ConfigError(f"unknown loss reduction {how!r}; choose one of {', '.join(REDUCTIONS)}")
    ones = mask.bool().double()
    if how == "token_mean":
        return (ones / sum(ones.sum()).clamp(min=1.0)).float()

    ids, rollout_of = torch.unique(rollout_ids, return_inverse=True)
    rollouts = sum(ones.new_tensor(float(len(ids)))).clamp(min=1.0)
    if how == "constant":
        if constant_length is None or constant_length < 1:
            raise ConfigError(f"the constant loss reduction needs a length of at least 1 token, got {constant_length}")
        return (ones / (constant_length * rollouts)).float()
    # Integer counts: exact in any order of addition.
    counts = torch.zeros(len(ids), dtype=torch.int64, device=mask.device)
    counts = counts.index_add(0, rollout_of.to(mask.device), mask_counts(mask, lengths))
    per_sample = 1.0 / (counts.clamp(min=1).double() * rollouts)
    return (ones * expand(per_sample[rollout_of.to(mask.device)], lengths)).float()


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the detached sum over unmasked tokens and their number: a metric's (sum, weight) for a mean over the step's tokens.

    Values of masked tokens are ignored, even NaN. The number is the sum of ``mask``, which must be 0 or 1.
    """
    return torch.where(mask.bool(), values.detach(), 0.0).sum(), mask.sum()


LOG_RATIO_CLAMP = 20.0
LOW_VAR_KL_CLAMP = 10.0
KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """KL per token, same shape as the inputs and differentiable in both.

    Args:
        log_probs, ref_log_probs: log pi and log pi_ref of the sampled tokens, natural logarithm.
        kind: one of ``KL_TYPES``; low_var_kl clamps d to +-20 and the result to +-10.
    """
    d = log_probs - ref_log_probs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.expm1(-d) + d
    if kind == "low_var_kl":
        d = d.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        return (torch.expm1(-d) + d).clamp(-LOW_VAR_KL_CLAMP, LOW_VAR_KL_CLAMP)
    raise ConfigError(f"unknown KL estimator {kind!r}; --kl-loss-type is one of {', '.join(KL_TYPES)}")


def engine_gap(train: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Measure the gap between trainer and engine on the sampled tokens: mean and largest |delta log p|, and k1 and k3 estimates of
    KL(rollout || train), as (sum or maximum, count). All arguments are [tokens]. The difference of a token is limited to 20 nats, so that a token
    with probability 0 on one side does not make the metric infinite."""
    delta = torch.where(mask.bool(), train - rollout, 0.0).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return {
        "mismatch/abs_log_prob": masked_sum(delta.abs(), mask),
        "mismatch/abs_log_prob_max": (torch.cat([delta.detach().abs(), delta.new_zeros(1)]).max(), mask.sum()),
        "mismatch/kl_k1": masked_sum(-delta, mask),
        "mismatch/kl_k3": masked_sum(torch.expm1(delta) - delta, mask),
    }


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

POLICY_LOSSES: dict[str, TokenLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def policy_loss_of(estimator: str) -> TokenLoss:
    """Return the policy loss for ``--advantage-estimator``: the loss with the same name, or PPO's clipped loss."""
    return POLICY_LOSSES.get(estimator, ppo)
