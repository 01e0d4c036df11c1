"""The formulas against float64 sums over the whole vocabulary."""

import pytest
import torch

from miles_distillation.divergence import sampled_reverse_kl, top_k_reverse_kl


def distributions(tokens=6, vocabulary=11):
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, tokens, vocabulary, generator=generator, dtype=torch.float64) * 2
    return student, teacher.log_softmax(-1)


def over_the_vocabulary(student, teacher):
    own = student.log_softmax(-1)
    return (own.exp() * (own - teacher)).sum(-1)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_top_k_is_the_divergence_with_all_other_tokens_as_one(k):
    logits, teacher = distributions()
    logits.requires_grad_()
    own, best = logits.log_softmax(-1), teacher.topk(k).indices
    joined = []
    for probabilities in (own.exp(), teacher.exp()):
        inside = probabilities.gather(-1, best)
        outside = torch.ones_like(probabilities).scatter(-1, best, 0.0)
        joined.append(torch.cat([inside, (probabilities * outside).sum(-1, keepdim=True)], -1))
    expected = (joined[0] * (joined[0] / joined[1]).log()).sum(-1)
    (gradient,) = torch.autograd.grad(expected.sum(), logits, retain_graph=True)

    found = top_k_reverse_kl(own.gather(-1, best), teacher.gather(-1, best))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], gradient, rtol=1e-9, atol=1e-12)
    assert bool((found >= 0).all() and (found <= over_the_vocabulary(logits, teacher) + 1e-12).all())
    single = top_k_reverse_kl(own.gather(-1, best).float(), teacher.gather(-1, best).float())
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-6)


def test_with_all_tokens_nothing_is_left_out():
    logits, teacher = distributions()
    found = top_k_reverse_kl(logits.log_softmax(-1).float(), teacher.float())
    torch.testing.assert_close(found.double(), over_the_vocabulary(logits, teacher), rtol=1e-5, atol=1e-5)
    assert top_k_reverse_kl(teacher.float(), teacher.float()).abs().max() < 1e-6


def test_the_sampled_token_estimates_the_divergence_and_its_gradient():
    """In expectation over the student's choice: E[log p - log q] = KL, and E[(log p - log q) grad log p] = grad KL."""
    logits, teacher = distributions(tokens=1)
    logits.requires_grad_()
    own, exact = logits.log_softmax(-1)[0], over_the_vocabulary(logits, teacher)[0]
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    gaps = sampled_reverse_kl(own.detach(), teacher[0])
    torch.testing.assert_close((own.detach().exp() * gaps).sum(), exact.detach())
    surrogate = (own.detach().exp() * gaps * own).sum()
    torch.testing.assert_close(torch.autograd.grad(surrogate, logits)[0], gradient)
