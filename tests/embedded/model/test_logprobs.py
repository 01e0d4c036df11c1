"""Log-probs in chunks, over a support, and after a family's own scaling of logits."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from miles_core.data.batch import Ragged
from miles_embedded.model.logprobs import head_log_probs, logits_of, token_log_probs, top_log_probs
from miles_embedded.model.operations import TORCH, log_probs


class Head(nn.Module):
    """A head on its own, and the largest number of rows it was given."""

    def __init__(self, vocabulary=11, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(6, vocabulary, bias=False, dtype=torch.float64)
        self.config = type("Config", (), {"vocab_size": vocabulary, **settings})()
        self.config.get_text_config = lambda: self.config
        self.most = 0
        self.lm_head.register_forward_pre_hook(lambda m, a: setattr(self, "most", max(self.most, len(a[0]))))

    def get_output_embeddings(self):
        return self.lm_head


class CappedHead(Head):
    """A class whose ``forward`` mentions what the families do with their logits."""

    def forward(self, hidden):
        config = self.config
        return (config.logit_scale, config.logits_scaling, config.final_logit_softcapping)


def inputs(rows=9):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, 6, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, torch.randint(0, 11, (rows,), generator=generator)


def supports(tokens):
    rows = [[int(t), (int(t) + 3) % 11, (int(t) + 5) % 11][: i % 4] for i, t in enumerate(tokens)]
    offsets = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()])
    return Ragged(torch.tensor([i for r in rows for i in r], dtype=torch.int32), offsets), rows


@pytest.mark.parametrize("with_support", [False, True])
def test_chunks_bound_the_rows_and_change_nothing(with_support):
    model, (hidden, tokens) = Head(), inputs()
    support = supports(tokens)[0] if with_support else None
    whole = token_log_probs(model, hidden, tokens, 0.7, support, entropy=True)
    grads = torch.autograd.grad(whole[0].sum() + whole[1].square().sum(), [hidden, *model.parameters()])
    model.most = 0
    pieces = token_log_probs(model, hidden, tokens, 0.7, support, entropy=True, chunk_elements=2 * 11 + 5)
    again = torch.autograd.grad(pieces[0].sum() + pieces[1].square().sum(), [hidden, *model.parameters()])
    assert model.most == 2
    for a, b in zip([*whole, *grads], [*pieces, *again], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_support_is_a_softmax_over_its_tokens():
    model, (hidden, tokens) = Head(), inputs()
    support, rows = supports(tokens)
    found, entropy = token_log_probs(model, hidden, tokens, 0.7, support, entropy=True)
    logits = model.lm_head(hidden) / 0.7
    for i, ids in enumerate(rows):
        ids = ids or list(range(11))
        expected = logits[i, ids].log_softmax(0)
        torch.testing.assert_close(found[i], expected[ids.index(int(tokens[i]))])
        torch.testing.assert_close(entropy[i], -(expected.exp() * expected).sum())
        assert len(ids) > 1 or found[i] == 0


def test_no_gradient_leaves_the_support():
    model, (hidden, tokens) = Head(), inputs()
    support, rows = supports(tokens)
    found, _ = token_log_probs(model, hidden, tokens, 1.0, support)
    (grad,) = torch.autograd.grad(found[2] + found[3], [model.lm_head.weight])
    outside = [i for i in range(11) if i not in rows[2] + rows[3]]
    assert grad[outside].abs().max() == 0 and grad.abs().max() > 0


def test_extreme_logits_stay_finite():
    model, (hidden, tokens) = Head(), inputs()
    support, _ = supports(tokens)
    found, entropy = token_log_probs(model, hidden * 1e5, tokens, 1.0, support, entropy=True)
    assert found.isfinite().all() and entropy.isfinite().all()


def test_logits_are_capped_and_scaled_as_the_family_does():
    model, (hidden, _) = CappedHead(final_logit_softcapping=2.0), inputs()
    plain = model.lm_head(hidden)
    torch.testing.assert_close(logits_of(model, hidden), torch.tanh(plain / 2) * 2)
    torch.testing.assert_close(logits_of(CappedHead(logit_scale=0.5), hidden), plain * 0.5)
    torch.testing.assert_close(logits_of(CappedHead(logits_scaling=4.0), hidden), plain / 4)
    torch.testing.assert_close(logits_of(CappedHead(logits_scaling=4.0, model_type="hyperclovax"), hidden), plain * 4)
    ignored = Head(final_logit_softcapping=2.0, logit_scale=0.5)  # its class has no such step
    torch.testing.assert_close(logits_of(ignored, hidden), plain)


def test_candidates_are_scored_over_the_whole_vocabulary_whatever_the_sampler_chose_from():
    model, (hidden, tokens) = Head(), inputs()
    support, candidates = supports(tokens)[0], torch.arange(27, dtype=torch.int32).reshape(9, 3) % 11
    expected = (model.lm_head(hidden) / 0.7).log_softmax(-1).gather(-1, candidates.long())
    grads = torch.autograd.grad(expected.square().sum(), [hidden, model.lm_head.weight])
    for elements in (1 << 20, 2 * 11 + 5):
        found = head_log_probs(model, hidden, tokens, 0.7, support, True, elements, candidates)
        torch.testing.assert_close(found[2], expected)
        for one, two in zip(found[:2], token_log_probs(model, hidden, tokens, 0.7, support, True), strict=True):
            torch.testing.assert_close(one, two)
        again = torch.autograd.grad(found[2].square().sum(), [hidden, model.lm_head.weight])
        for one, two in zip(grads, again, strict=True):
            torch.testing.assert_close(one, two)


def test_the_most_probable_token_of_a_peaked_distribution_keeps_its_digits():
    """Distillation reads the probability of all other tokens from it, which float32 cannot represent as a difference from 1."""
    model, (hidden, tokens) = Head().float(), inputs()
    weight = model.lm_head.weight.detach()
    hidden = 40 * (weight[3] / weight[3].square().sum()).expand(9, 6)
    exact = model.lm_head(hidden).detach().double().log_softmax(-1)
    best, found, normalizer = top_log_probs(model, hidden, 2)
    torch.testing.assert_close(
        (found + normalizer[:, None]).detach(), model.lm_head(hidden).gather(-1, best.long()).detach()
    )
    assert bool((found[:, 0] < 0).all() and (found[:, 0] > -1e-6).all())
    torch.testing.assert_close(found.double(), exact.gather(-1, best.long()), rtol=1e-5, atol=0)
    others = head_log_probs(model, hidden, tokens, candidates=best)[2]
    torch.testing.assert_close(others.detach().double(), exact.gather(-1, best.long()), rtol=1e-5, atol=0)


class Direct:
    """An operation that computes from logits as the head returns them, and records what it was given."""

    def __init__(self):
        self.seen = []

    def __call__(self, logits, tokens):
        return log_probs(logits, tokens)

    def of_logits(self, logits, tokens, temperature):
        self.seen.append((logits.dtype, len(logits), temperature))
        return log_probs(logits.float() / temperature, tokens)


def test_an_operation_on_plain_logits_gets_them_in_larger_chunks_unless_more_is_needed():
    model, (hidden, tokens) = Head().to(torch.bfloat16), inputs()
    hidden = hidden.detach().to(torch.bfloat16)
    expected = token_log_probs(model, hidden, tokens, 0.7)[0]
    direct = Direct()
    model.__dict__["miles_operations"] = replace(TORCH, log_probs=direct)
    torch.testing.assert_close(token_log_probs(model, hidden, tokens, 0.7)[0], expected)
    assert direct.seen == [(torch.bfloat16, 9, 0.7)]
    token_log_probs(model, hidden, tokens, 0.7, chunk_elements=5 * 11)
    assert [rows for _, rows, _ in direct.seen[1:]] == [5, 4]
    token_log_probs(model, hidden, tokens, 0.7, entropy=True)
    token_log_probs(model, hidden, tokens, 0.7, supports(tokens)[0])
    head_log_probs(model, hidden, tokens, 0.7, candidates=tokens[:, None])
    assert len(direct.seen) == 3
    token_log_probs(model.double(), hidden.double(), tokens, 0.7)
    assert len(direct.seen) == 3
