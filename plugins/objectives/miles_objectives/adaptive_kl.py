"""Adaptive KL coefficient (Ziegler et al., arXiv 1909.08593, section 2.2).

After each rollout of n samples with the measured KL to the reference model, the coefficient beta changes in proportion to the error:

    e = clip(KL / target - 1, -0.2, 0.2)
    beta = beta (1 + e n / horizon)

The paper writes K_beta = 0.1 for n / horizon; the horizon in samples, 10,000, is that of its published code. KL is the mean over trained
tokens of the k3 estimate, in nats (metric ``train/ref_kl``), where the paper sums over a response: divide its target by the length.
"""

from __future__ import annotations

#: Bound of the relative error.
LARGEST = 0.2


def next_coefficient(beta: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return the coefficient after a rollout of ``samples`` samples whose mean KL per token was ``kl`` nats."""
    error = min(max(kl / target - 1.0, -LARGEST), LARGEST)
    return beta * (1.0 + error * samples / horizon)
