"""What the draft computes in a training pass of the policy."""

from __future__ import annotations

import pytest
import torch

from miles_core.data import Sample, collate
from miles_core.trainer import Context
from miles_embedded import PackedCall, load_model
from miles_embedded.trainer.packing import pack
from miles_speculative.eagle import attach_eagle, new_eagle
from miles_speculative.loss import entries
from miles_testing.tiny import tiny_checkpoint

#: Sequences of two groups whose samples share a prompt, one that stands alone, and one whose prompt is a single token.
SEQUENCES = ([3, 7, 5, 9, 11, 4], [3, 7, 5, 8, 2, 6, 10], [12, 4, 9, 9, 3], [5, 6, 7], [5, 9, 9, 2])
PROMPTS, GROUPS = (3, 3, 2, 1, 1), (0, 0, 1, 2, 2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    directory = tmp_path_factory.mktemp("eagle")
    checkpoint = tiny_checkpoint("qwen3", directory / "model")
    model = load_model(checkpoint)
    head = attach_eagle(model, new_eagle(checkpoint, directory / "head", 2))
    with torch.no_grad():
        for parameter in head.parameters.values():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return head


def run(draft, sequences, prompts, groups, share, hidden_of, **options):
    """The draft's output for each token, by sequence and position."""
    samples = [
        Sample(tokens=list(row), response_length=len(row) - prompt, index=i, group_index=group)
        for i, (row, prompt, group) in enumerate(zip(sequences, prompts, groups, strict=True))
    ]
    batch = collate(samples)
    packing = pack(batch, share=share)
    ctx = Context("train", (0, 1), packing.rows)
    ctx.attached["packing"] = packing
    flat = torch.cat([hidden_of(row) for row in sequences])
    out = entries(draft, flat[packing.rows], batch.tokens, ctx, PackedCall(ctx, packing), **options)
    starts = [0, *torch.tensor([len(row) for row in sequences]).cumsum(0).tolist()]
    rows = packing.row_of.tolist()
    return {
        (i, at): out[rows[starts[i] + at]]
        for i, row in enumerate(sequences)
        for at in range(len(row))
        if rows[starts[i] + at] >= 0
    }


def hidden_of(row):
    """Hidden states that depend on the tokens in front of them only, as a policy's do."""
    generators = [torch.Generator().manual_seed(hash(tuple(row[: i + 1])) % 2**31) for i in range(len(row))]
    return torch.stack([torch.randn(64, generator=g) for g in generators])


@torch.no_grad()
@pytest.mark.parametrize("share", [True, False])
def test_without_the_first_entry_a_head_computes_what_an_engine_without_it_does(draft, share):
    """SGLang's draft begins with (second token, hidden state of the first): a sequence of its own, computed here by Transformers' layers."""
    size = draft.policy.config.hidden_size
    states = {tuple(row): hidden_of(row)[:, :size] for row in SEQUENCES}
    found = run(draft, SEQUENCES, PROMPTS, GROUPS, share, lambda row: states[tuple(row)], first_seen=False)
    kept = run(draft, SEQUENCES, PROMPTS, GROUPS, share, lambda row: states[tuple(row)])
    differing = 0
    for i, row in enumerate(SEQUENCES):
        tokens = torch.tensor(row[1:])
        embedded = draft.policy.get_input_embeddings()(tokens)
        joined = draft.module.fc(torch.cat([embedded, states[tuple(row)][:-1]], -1))
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)
        expected = plain_layers(draft.module, joined, torch.arange(1, len(row)), mask)
        shared_prompt_of_one = share and PROMPTS[i] == 1
        for at in range(1, len(row)):
            if (i, at) not in found or shared_prompt_of_one:  # this prompt keeps its entry
                continue
            torch.testing.assert_close(found[i, at], expected[at - 1], rtol=1e-4, atol=1e-5)
            differing += not torch.allclose(kept[i, at], expected[at - 1], rtol=1e-2, atol=1e-3)
    assert differing > 5


def plain_layers(module, hidden, positions, mask):
    """Llama's decoder layers, written out: the first has no norm before its attention."""
    config = module.config
    dim, heads, few = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    angles = positions[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))

    def rotate(x):
        half = dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    for layer in module.layers:
        normed = layer.input_layernorm(hidden)
        q = rotate(layer.self_attn.q_proj(normed).view(-1, heads, dim))
        k = rotate(layer.self_attn.k_proj(normed).view(-1, few, dim)).repeat_interleave(heads // few, 1)
        v = layer.self_attn.v_proj(normed).view(-1, few, dim).repeat_interleave(heads // few, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5 + mask
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(hidden), -1)
        hidden = hidden + layer.self_attn.o_proj(attended)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden
