"""The reverse Kullback-Leibler divergence KL(student || teacher) at each position, from samples of the student.

The sampled token alone gives an unbiased estimate, ``log p_student - log p_teacher``, whose negative is the advantage of that token: the
gradient of the policy loss is then that of the divergence at this position, without later positions (on-policy distillation; MiniLLM,
arXiv 2306.08543, derives it; GKD, arXiv 2306.13649, compares divergences on the student's own samples).

With the teacher's k most probable tokens the divergence itself can be computed, between the distributions that have these tokens and one
entry for all others. It is at most the divergence over the whole vocabulary, equal to it where k is the vocabulary, and has no
sampling noise.
"""

import torch
from torch import Tensor


def sampled_reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Estimate of the divergence at each token, from the log-probabilities [tokens] of tokens that the student sampled: [tokens]."""
    return student - teacher


def top_k_reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """The divergence over k tokens and the rest of the vocabulary.

    Args:
        student: [..., k] log-probabilities of the k tokens, with gradient.
        teacher: [..., k] the teacher's of the same tokens.

    Returns:
        [...], at least 0, in the dtype of ``student``; computed in float64, because its terms cancel where both distributions are peaked.
    """
    own, other = student.double(), teacher.double()
    inside = (own.exp() * (own - other)).sum(-1)
    rest, other_rest = log_rest(own, student.dtype), log_rest(other, teacher.dtype)
    return (inside + rest.exp() * (rest - other_rest)).to(student.dtype)


def log_rest(log_probs: Tensor, measured: torch.dtype) -> Tensor:
    """Log-probability of all tokens that are not among these: [..., k] float64 -> [...].

    The most probable token is subtracted from 1 with ``expm1``, which keeps the digits of a log-probability near 0: 1 - p would cancel
    all of them for the peaked distributions of trained teachers. A rest below the resolution of the log-probabilities counts as that
    resolution, so that it stays finite.

    Args:
        measured: dtype in which the log-probabilities were computed.
    """
    best, at = log_probs.max(-1, keepdim=True)
    others = -torch.expm1(best).squeeze(-1)
    rest = others - log_probs.scatter(-1, at, -torch.inf).exp().sum(-1)
    resolution = torch.finfo(measured).eps * others.detach() + torch.finfo(torch.float32).tiny
    return torch.maximum(rest, resolution).log()
