"""The reverse Kullback-Leibler divergence KL(student || teacher) at each position, from samples of the student.

The sampled token alone gives an unbiased estimate, ``log p_student - log p_teacher``, whose negative is the advantage of that token: the
gradient of the policy loss is then that of the divergence at this position, the later ones left out (on-policy distillation; MiniLLM,
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
        [...], at least 0.
    """
    inside = (student.exp() * (student - teacher)).sum(-1)
    own, other = log_rest(student), log_rest(teacher)
    return inside + own.exp() * (own - other)


def log_rest(log_probs: Tensor) -> Tensor:
    """Log-probability of all tokens that are not among these: [..., k] -> [...]. A rest below the resolution of the dtype counts as that
    resolution, so that it stays finite."""
    smallest = torch.finfo(log_probs.dtype).eps
    return torch.log1p(-log_probs.exp().sum(-1).clamp(max=1.0 - smallest))
