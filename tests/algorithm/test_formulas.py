"""Every algorithm from rewards to the loss of a step, against its formula in plain Python floats, sample by sample and token by token."""

from __future__ import annotations

from math import exp, sqrt
from statistics import fmean, stdev

import pytest
import torch

from miles_core.algorithm.choices import ALGORITHMS, loss_weights
from miles_core.algorithm.dapo import overlong_penalty
from miles_core.algorithm.objective import AdvantageInputs, Clip, PolicyLossInputs

#: Two prompts with three rollouts each, and a prompt whose rewards are equal.
REWARDS = [1.0, 0.0, 0.25, 0.5, 1.0, 0.0, 1.0, 1.0]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2]
LENGTHS = [4, 3, 5, 2, 6, 3, 4, 1]
TRAINED = [t % 5 != 1 for t in range(sum(LENGTHS))]
COLUMNS = torch.randn(3, sum(LENGTHS), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
NEW, OLD, REF = (COLUMNS * torch.tensor([[0.5], [0.5], [0.4]]) - 2).tolist()
LOW, HIGH, LONGEST = 0.2, 0.28, 6


def tokens_of(sample: int) -> list[int]:
    """The trained tokens of a sample."""
    start = sum(LENGTHS[:sample])
    return [t for t in range(start, start + LENGTHS[sample]) if TRAINED[t]]


def others_in(sample: int, rewards: list[float]) -> list[float]:
    """The rewards of a sample's group, its own included."""
    return [r for r, group in zip(rewards, GROUPS, strict=True) if group == GROUPS[sample]]


def normalised(sample: int, rewards: list[float]) -> float:
    group = others_in(sample, rewards)
    return (rewards[sample] - fmean(group)) / (stdev(group) + 1e-6)


def centred(sample: int, rewards: list[float]) -> float:
    return rewards[sample] - fmean(others_in(sample, rewards))


def left_out(sample: int, rewards: list[float]) -> float:
    others = others_in(sample, rewards)
    others.remove(rewards[sample])
    return rewards[sample] - fmean(others)


def per_sample(score, rewards):
    """The advantage of each trained token, from a score per sample."""
    return {t: score(i, rewards) for i in range(len(LENGTHS)) for t in tokens_of(i)}


def returns(score, rewards):
    """REINFORCE++: whitened discounted returns with a KL of coefficient 0.1, gamma 0.9."""
    found = {}
    for sample in range(len(LENGTHS)):
        running = score(sample, rewards)
        for number, t in enumerate(reversed(tokens_of(sample))):
            running = -0.1 * (OLD[t] - REF[t]) + (0.9 * running if number else running)
            found[t] = running
    mean, deviation = fmean(found.values()), sqrt(stdev(found.values()) ** 2 + 1e-8)
    return {t: (value - mean) / deviation for t, value in found.items()}


def clipped(ratio: float, advantage: float) -> float:
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - LOW), 1 + HIGH))


def token_ratio(t: int, sample: int) -> float:
    return clipped_ratio(NEW[t] - OLD[t])


def sequence_ratio(t: int, sample: int) -> float:
    return clipped_ratio(fmean(NEW[u] - OLD[u] for u in tokens_of(sample)))


def clipped_ratio(log_ratio: float) -> float:
    return exp(min(max(log_ratio, -20), 20))


def weight_of(how: str, sample: int) -> float:
    rollouts = len(LENGTHS)
    if how == "rollout_mean":
        return 1 / (len(tokens_of(sample)) * rollouts)
    return 1 / sum(TRAINED) if how == "token_mean" else 1 / (LONGEST * rollouts)


#: name, --loss-aggregation, advantages, ratio
FORMULAS = [
    ("grpo", "rollout_mean", lambda rewards: per_sample(normalised, rewards), token_ratio),
    ("dapo", "token_mean", lambda rewards: per_sample(normalised, rewards), token_ratio),
    ("dr_grpo", "constant", lambda rewards: per_sample(centred, rewards), token_ratio),
    ("rloo", "rollout_mean", lambda rewards: per_sample(left_out, rewards), token_ratio),
    ("gspo", "rollout_mean", lambda rewards: per_sample(normalised, rewards), sequence_ratio),
    ("cispo", "token_mean", lambda rewards: per_sample(normalised, rewards), token_ratio),
    ("reinforce_plus_plus", "rollout_mean", lambda rewards: returns(lambda i, r: r[i], rewards), token_ratio),
    ("reinforce_plus_plus_baseline", "rollout_mean", lambda rewards: returns(centred, rewards), token_ratio),
]


@pytest.mark.parametrize(("name", "how", "advantages_of", "ratio_of"), FORMULAS, ids=[a[0] for a in FORMULAS])
def test_the_loss_of_a_step_is_the_formula(name, how, advantages_of, ratio_of):
    rewards = list(REWARDS)
    if name == "dapo":
        rewards = [r - min(max((n - 2) / 4, 0), 1) for r, n in zip(rewards, LENGTHS, strict=True)]
    advantages = advantages_of(rewards)
    expected = 0.0
    for sample in range(len(LENGTHS)):
        for t in tokens_of(sample):
            ratio = ratio_of(t, sample)
            if name == "cispo":
                loss = -min(ratio, 1 + HIGH) * advantages[t] * NEW[t]
            else:
                loss = clipped(ratio, advantages[t])
            expected += weight_of(how, sample) * loss

    lengths, mask = torch.tensor(LENGTHS), torch.tensor(TRAINED)
    tensor = torch.tensor(REWARDS, dtype=torch.float64)
    if name == "dapo":
        tensor = tensor + overlong_penalty(lengths, LONGEST, buffer=4)
    objective = ALGORITHMS["grpo" if name == "dapo" else name]
    new, old, ref = (torch.tensor(column, dtype=torch.float64) for column in (NEW, OLD, REF))
    options = {"kl": old - ref, "kl_coef": 0.1, "gamma": 0.9} if objective.kl_in_reward else {}
    found = objective(AdvantageInputs(tensor, torch.tensor(GROUPS), torch.arange(8), lengths, mask, **options))
    owner = torch.repeat_interleave(torch.arange(8), lengths)
    loss, _ = objective.policy_loss(PolicyLossInputs(new, old, found, mask, owner), Clip(LOW, HIGH))
    weights = loss_weights(mask, lengths, torch.arange(8), how, LONGEST)
    assert float((loss * weights).sum()) == pytest.approx(expected, rel=2e-6)  # weights are float32
