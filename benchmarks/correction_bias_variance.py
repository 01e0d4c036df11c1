"""Bias and variance of each correction against the exact policy gradient, by enumeration.

A policy over sequences of T tokens from a vocabulary of V is a table of logits, one row a prefix, so that every one of the V^T
sequences can be enumerated. The engine's policy is the trainer's with Gaussian noise on the logits. The quantity wanted is the
gradient of the trainer's expected reward; an estimator draws a sequence from the engine and returns sum_t w_t A grad log p(y_t),
with the weights of ``miles_tis`` and the advantage A = R - E_train[R]. Its mean and covariance are sums over all sequences, so
nothing is sampled:

- bias: |E[g] - g*| / |g*|; deviation: sqrt(tr Cov g) / |g*|, of one sequence;
- error at N: sqrt(bias^2 + deviation^2 / N), what a batch of N sequences is off by.

Means over random policies, rewards and noises, with 95 % t-intervals. The last line is one JSON object.
"""

from __future__ import annotations

import math
import statistics
import sys
from itertools import product
from typing import Any

import torch
from measure import finish, installed, options
from torch import Tensor

UNBOUNDED = 1e8
#: name -> options of ``TisConfig``; None is no correction at all.
CORRECTIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "token, unbounded": {"clip": UNBOUNDED},
    "token, truncate 2 (TIS)": {"clip": 2.0},
    "token, mask .5-2 (MIS)": {"mode": "mask", "clip_low": 0.5, "clip": 2.0},
    "token, mask .5-5 (IcePop)": {"mode": "mask", "clip_low": 0.5, "clip": 5.0},
    "token, clip .5-2": {"mode": "clip", "threshold": 2.0},
    "sequence, unbounded": {"level": "sequence", "clip": UNBOUNDED},
    "sequence, truncate 2": {"level": "sequence", "clip": 2.0},
    "sequence, mask .5-2": {"level": "sequence", "mode": "mask", "threshold": 2.0},
    "geometric, truncate 2": {"level": "geometric", "clip": 2.0},
    "geometric, mask .8-1.25": {"level": "geometric", "mode": "mask", "threshold": 1.25},
}
#: Two-sided 95 % quantile of Student's t, by degrees of freedom.
STUDENT = {4: 2.776, 9: 2.262, 19: 2.093}


class Problem:
    """One random policy, reward and engine.

    Attributes:
        train, rollout: [sequences, length] log-probabilities.
        score: [sequences, length, parameters] gradient of each token's log-probability.
        advantage: [sequences]; exact: [parameters].
    """

    def __init__(self, vocabulary: int, length: int, noise: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sequences = torch.tensor(list(product(range(vocabulary), repeat=length)))
        prefixes = sum(vocabulary**t for t in range(length))
        logits = torch.randn(prefixes, vocabulary, generator=generator, dtype=torch.float64)
        disturbed = logits + noise * torch.randn(prefixes, vocabulary, generator=generator, dtype=torch.float64)
        reward = torch.randn(len(sequences), generator=generator, dtype=torch.float64)
        row = torch.zeros_like(sequences)
        start = number = 0
        for t in range(length):
            number = (
                sequences[:, :t] @ torch.tensor([vocabulary**i for i in range(t)])
                if t
                else torch.zeros(len(sequences), dtype=torch.int64)
            )
            row[:, t] = start + number
            start += vocabulary**t
        self.train, self.rollout = (table.log_softmax(-1)[row, sequences] for table in (logits, disturbed))
        probabilities = logits.softmax(-1)
        score = torch.zeros(*sequences.shape, prefixes, vocabulary, dtype=torch.float64)
        at = torch.arange(len(sequences))
        for t in range(length):
            score[at, t, row[:, t]] -= probabilities[row[:, t]]
            score[at, t, row[:, t], sequences[:, t]] += 1
        self.score = score.flatten(2)
        wanted = self.train.sum(-1).exp()
        self.advantage = reward - (wanted * reward).sum()
        self.exact = (wanted * self.advantage) @ self.score.sum(1)

    def weights(self, chosen: dict[str, Any] | None) -> Tensor:
        """[sequences, length] as the plugin gives them."""
        from miles_core.algorithm.correction import CorrectionInputs
        from miles_tis.config import TisConfig
        from miles_tis.correction import importance_correction

        if chosen is None:
            return torch.ones_like(self.train)
        count, length = self.train.shape
        ids, flat = torch.arange(count), torch.ones(count * length)
        inputs = CorrectionInputs(
            old_log_probs=self.train.flatten(),
            rollout_log_probs=self.rollout.flatten(),
            mask=flat,
            advantages=flat,
            lengths=torch.full((count,), length),
            group=ids,
            rollout=ids,
        )
        return importance_correction(inputs, TisConfig(use=True, **chosen)).factor.view(count, length)

    def errors(self, chosen: dict[str, Any] | None) -> tuple[float, float]:
        """(bias, deviation), relative to the exact gradient's norm."""
        drawn = self.rollout.sum(-1).exp()
        estimate = torch.einsum("st,stp->sp", self.weights(chosen), self.score) * self.advantage[:, None]
        mean = drawn @ estimate
        scale = float(self.exact.norm())
        variance = float((drawn @ (estimate - mean).square()).sum())
        return float((mean - self.exact).norm()) / scale, math.sqrt(variance) / scale


def interval(values: list[float]) -> list[float]:
    """[mean, half width of its 95 % interval]."""
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return [round(statistics.fmean(values), 4), round(half, 4)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--vocabulary", type=int, default=4)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument(
        "--noises", type=float, nargs="+", default=[0.02, 0.1, 0.5], help="noise of the engine's logits"
    )
    parser.add_argument("--problems", type=int, default=10, choices=[n + 1 for n in STUDENT])
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 8192], help="N")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table: dict[str, Any] = {}
    for noise in given.noises:
        problems = [Problem(given.vocabulary, given.length, noise, seed) for seed in range(given.problems)]
        kl = [float((p.rollout.sum(-1).exp() * (p.rollout - p.train).sum(-1)).sum()) / given.length for p in problems]
        rows: dict[str, Any] = {"kl_a_token": interval(kl)}
        print(f"noise {noise:g}: KL(rollout || train) {rows['kl_a_token'][0]:.2e} a token", file=sys.stderr)
        for name, chosen in CORRECTIONS.items():
            found = [p.errors(chosen) for p in problems]
            row = {"bias": interval([b for b, _ in found]), "deviation": interval([d for _, d in found])}
            for batch in given.batches:
                row[f"error_at_{batch}"] = interval([math.sqrt(b * b + d * d / batch) for b, d in found])
            rows[name] = row
            print(f"  {name:26} " + "  ".join(f"{k} {v[0]:.4f}+-{v[1]:.4f}" for k, v in row.items()), file=sys.stderr)
        table[f"{noise:g}"] = rows
    result = {
        "workload": {k: getattr(given, k) for k in ("vocabulary", "length", "problems", "batches")},
        "by_noise": table,
    }
    finish("correction_bias_variance", result, given.save, lambda: installed("miles-core", "miles-plugin-tis", "torch"))


if __name__ == "__main__":
    main()
