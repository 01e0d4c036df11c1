"""KTO: Kahneman-Tversky optimization (arXiv 2402.01306), for single answers that are desirable or not.

For an answer y to a prompt x, and the answers y' of the same step that belong to other prompts:

    log-ratio       r = sum_y log pi/pi_ref
    reference       z = max(0, mean over (x, y') of sum_y' log pi/pi_ref)
    loss            L = w_d (1 - sigmoid(h)), h = beta (r - z)    of a desirable answer  beta is ``--kl-coef``
                    L = w_u (1 - sigmoid(h)), h = beta (z - r)    of an undesirable one
    gradient        dL = -+ w beta sigmoid(h) sigmoid(-h) sum_y d log pi

z is the biased estimate of KL(pi, pi_ref) of section 4.1, for which no answer is sampled and which has no gradient: every prompt is read
with the answer of another row of the step. The row is the one before it, as in TRL's ``KTOTrainer``, and all rows of the step are averaged,
on every rank and in every micro-batch. As for ``dpo``, r and z are computed before the step, and -dL is the advantage of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from miles_core.data import Sample
from miles_core.plugin import Policy, Run
from miles_core.trainer import AdvantageInputs, LearnerHandle, Needs, Objective
from miles_offline.ratios import log_ratios, on_tokens
from miles_offline.sft import likelihood_loss

#: Scalars of each sample: the reference z, which a hook attaches before training; for metrics the loss and the implicit reward.
REFERENCE, LOSS, REWARD = "kto_reference", "kto_loss", "kto_reward"


def make_advantage(desirable: float, undesirable: float) -> Objective:
    """Create the objective with the weights of both labels."""

    def advantage(inputs: AdvantageInputs) -> Tensor:
        """Compute +- w beta sigmoid(h) sigmoid(-h) on the tokens of desirable and undesirable texts, [tokens]."""
        assert inputs.batch is not None
        ratio, good = log_ratios(inputs), inputs.rewards.cpu() > 0
        # absent on a rank without samples
        reference = inputs.batch.scalars.get(REFERENCE, ratio.new_zeros(len(ratio))).cpu()
        sign = torch.where(good, 1.0, -1.0).double()
        weight = torch.where(good, desirable, undesirable).double()
        value = torch.sigmoid(inputs.kl_coef * sign * (ratio - reference))
        for name, column in ((LOSS, weight * (1 - value)), (REWARD, inputs.kl_coef * ratio), (REFERENCE, reference)):
            inputs.batch.scalars[name] = column.to(inputs.mask.device)
        return on_tokens(sign * weight * inputs.kl_coef * value * (1 - value), inputs)

    return Objective(advantage, likelihood_loss, Needs(whole_step=False, columns=(REFERENCE,)), kl_in_reward=True)


def make_kto(run: Run, policy: Policy) -> Objective:
    """``--advantage-estimator kto``."""
    options = run.config_of(policy).plugin("offline")
    return make_advantage(options.kto_desirable_weight, options.kto_undesirable_weight)


def mismatch(samples: Sequence[Sample], limit: int | None) -> list[Sample]:
    """Return every prompt with the answer of the sample before it, the first one with the last answer. What exceeds ``limit`` tokens is
    cut off: both texts fit alone, and z is an estimate."""
    found = []
    for number, sample in enumerate(samples):
        other = samples[number - 1]
        prompt = list(sample.tokens[: sample.prompt_length])
        room = other.response_length if limit is None else min(other.response_length, limit - len(prompt))
        start = other.prompt_length
        tokens = [*prompt, *other.tokens[start : start + room]]
        found.append(replace(sample, tokens=tokens, response_length=room, loss_mask=other.mask[:room], fields={}))
    return found


async def attach_reference(handle: LearnerHandle, samples: Sequence[Sample], limit: int | None) -> None:
    """Compute z with the weights before the step, and attach it to every sample."""
    texts = mismatch(samples, limit)
    policy, reference = [await handle.columns(texts, kind, ("log_probs",)) for kind in ("old", "ref")]
    ratios = [
        float(((own["log_probs"].astype(np.float64) - ref["log_probs"]) * np.asarray(text.mask)).sum())
        for own, ref, text in zip(policy, reference, texts, strict=True)
    ]
    estimate = np.float64(max(0.0, float(np.mean(ratios))))
    for sample in samples:
        sample.fields[REFERENCE] = estimate
