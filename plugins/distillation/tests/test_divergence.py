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


@pytest.mark.parametrize("peak", [10.0, 20.0, 30.0])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_the_rest_of_a_peaked_teacher_keeps_its_digits_in_float32(peak, k):
    """The rest of a distribution with a logit of 30 has 1e-11 of its mass, and 1 - p has no digit of it in float32."""
    student, teacher = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    student[:, 0], teacher[:, 0] = 12.0, peak
    student.requires_grad_()
    best = teacher.topk(k).indices
    own, other = student.log_softmax(-1), teacher.log_softmax(-1)
    parts = []
    for logits, log_probs in ((student, own), (teacher, other)):
        rest = logits.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True) - logits.logsumexp(-1, keepdim=True)
        parts.append(torch.cat([log_probs.gather(-1, best), rest], -1))
    exact = (parts[0].exp() * (parts[0] - parts[1])).sum(-1)
    (gradient,) = torch.autograd.grad(exact.sum(), student, retain_graph=True)

    found = top_k_reverse_kl(own.gather(-1, best).float(), other.gather(-1, best).float())
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), student)[0], gradient, rtol=1e-2, atol=1e-9)
