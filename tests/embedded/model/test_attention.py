"""Windows, chunks, caps, sinks and indexers where several tokens are fed at once; the rest is in ``tests/embedded/test_families.py``."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import collate
from miles_core.errors import CheckpointError
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.runner import Runner
from miles_embedded.engine.settings import Settings
from miles_embedded.model.attention import AttentionOptions, add_sinks, attend_padded
from miles_embedded.model.load import load_model, prepare
from miles_embedded.testing.comparison import small_groups
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.tiny import FAMILIES, ROUTER_FAMILIES, tiny_checkpoint

COMMON = {k: v for k, v in FAMILIES["qwen3"][1].items() if k != "head_dim"}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {k: v for k, v in FAMILIES["deepseek_v32"][1].items() if k != "num_local_experts"}
ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

#: What has to be there besides plain causal attention, and a change of the configuration that takes it away.
CASES = {
    "sinks and windows": ("GptOssConfig", FAMILIES["gpt_oss"][1], {"sliding_window": 500}),
    "an indexer": ("DeepseekV32Config", LATENT, {"index_topk": 500}),
    "an indexer for two layers": (
        "GlmMoeDsaConfig",
        {**LATENT, "indexer_types": ["full", "shared"]},
        {"index_topk": 500},
    ),
    "chunks and positions that scale queries": (
        "Llama4TextConfig",
        ROUTER_FAMILIES["llama4"][1],
        {"attention_chunk_size": 500, "attn_temperature_tuning": False},
    ),
    "capped scores": (
        "Gemma2Config",
        {**COMMON, **ALTERNATING, "head_dim": 16, "attn_logit_softcapping": 1.0},
        {"attn_logit_softcapping": 500.0},
    ),
    "one window for all layers": ("MistralConfig", {**COMMON, "sliding_window": 5}, {"sliding_window": 500}),
    "a window in some layers": ("Gemma3TextConfig", {**COMMON, **ALTERNATING, "head_dim": 16}, {"sliding_window": 500}),
    "a window that only the mask knows": (
        "Qwen2MoeConfig",
        {**COMMON, **MOE, "use_sliding_window": True, "sliding_window": 5, "shared_expert_intermediate_size": 16},
        {"sliding_window": 500},
    ),
}
PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15]]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(checkpoint, Transformers' own model of it, the same without what is special)."""
    name, values, plain = CASES[request.param]
    directory = tmp_path_factory.mktemp("options") / name
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, name, (name, values))
        tiny_checkpoint(name, directory)
    load = transformers.AutoModelForCausalLM.from_pretrained
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    changed = transformers.AutoConfig.from_pretrained(directory)
    for key, value in plain.items():
        setattr(changed, key, value)
    return directory, load(directory, **options), load(directory, config=changed, **options)


def test_rows_fed_several_tokens_at_once_equal_transformers(case):
    """As a drafting decoder feeds them: another number of tokens for each row, some of which are dropped again."""
    checkpoint, reference, plain = case
    runner = Runner(load_model(checkpoint))
    runner.prefixes([PROMPTS[0], PROMPTS[2]], set())
    slots = runner.cache.add_rows([1, 0, 1])
    texts = [list(PROMPTS[i]) for i in (2, 0, 2)]
    generator = torch.Generator().manual_seed(5)
    for counts, dropped in (((3, 1, 7), (1, 0, 4)), ((1, 1, 1), (0, 0, 0)), ((6, 2, 2), (0, 0, 0))):
        fed = [torch.randint(2, 60, (n,), generator=generator).tolist() for n in counts]
        logits = runner.forward(slots, fed, set()).logits.split(list(counts))
        for i, drop in enumerate(dropped):
            whole = texts[i] + fed[i]
            with torch.no_grad():
                expected = reference(torch.tensor([whole])).logits[0, len(texts[i]) :]
            torch.testing.assert_close(logits[i].log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=3e-5)
            texts[i] = whole[: len(whole) - drop]
        runner.cache.own.lengths[slots] -= np.array(dropped)
    with torch.no_grad():
        without = plain(torch.tensor([whole])).logits[0, -len(expected) :]
    # or none of this would show that windows and indexers are at work
    assert (without.log_softmax(-1) - expected.log_softmax(-1)).abs().max() > 0.1


def test_an_indexer_rests_where_it_has_nothing_to_choose(tmp_path):
    """No scores for queries with fewer keys than it may keep, and the same numbers."""
    checkpoint = tiny_checkpoint("deepseek_v32", tmp_path, index_topk=64)
    model = load_model(checkpoint)
    keys = []
    layer_norm = model.model.layers[0].self_attn.indexer.k_norm
    layer_norm.register_forward_hook(lambda module, args, output: keys.append(output.shape[1]))
    trainer = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig()))
    trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
    batch = collate(small_groups())
    dense = trainer.log_probs(batch, "old")["log_probs"]
    assert set(keys) == {1}  # the single row of the module itself
    model.config.index_topk = 4
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 4
    assert (trainer.log_probs(batch, "old")["log_probs"] - dense).abs().max() > 0.1


def test_an_indexers_scores_are_bounded(monkeypatch, tmp_path):
    """Computed a few queries at a time, they choose the same keys."""
    checkpoint = tiny_checkpoint("deepseek_v32", tmp_path)
    whole = EmbeddedEngine(load_model(checkpoint), Settings(str))
    sequences = [s.tokens for s in small_groups()]
    expected = asyncio.run(whole.score(sequences))
    monkeypatch.setattr("miles_embedded.model.indexer._SCORES", 16 * 25 * 4)
    for a, b in zip(asyncio.run(whole.score(sequences)), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_sinks_as_a_key_are_sinks_as_a_score():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 7, d, generator=generator) for h, d in ((6, 8), (2, 8), (2, 5)))
    sinks, mask = (
        torch.randn(6, generator=generator),
        AttentionOptions(3).sees(torch.arange(7)[:, None], torch.arange(7))[None, None],
    )
    more_q, more_k, more_v, more_mask = add_sinks(q, k, v, mask, sinks, 0.3)
    assert more_q.shape == (2, 6, 7, 11) and more_k.shape == (2, 2, 8, 11) and more_v.shape == (2, 2, 8, 5)
    assert more_mask.shape == (1, 1, 7, 8)
    scores = torch.einsum("nhqd,nhkd->nhqk", more_q, more_k.repeat_interleave(3, 1)) * 0.3
    torch.testing.assert_close(scores[..., 0], sinks[None, :, None].expand(2, -1, 7))
    torch.testing.assert_close(scores[..., 1:], torch.einsum("nhqd,nhkd->nhqk", q, k.repeat_interleave(3, 1)) * 0.3)
    out = attend_padded(q, k, v, mask, 0.3, True, AttentionOptions(sinks=torch.full((6,), 40.0)))
    assert out.abs().max() < 1e-6  # sinks far above all scores leave nothing


def test_a_window_over_all_keys_is_none():
    assert AttentionOptions(8).within(8) is None and AttentionOptions(8).within(9) == AttentionOptions(8)
    sinks = torch.zeros(2)
    assert AttentionOptions(8, sinks).within(8).window == 0 and AttentionOptions(8, sinks).within(8).sinks is sinks


def test_layers_with_a_state_of_their_own_kind_are_refused():
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.MiniMaxConfig(
            **COMMON, num_local_experts=4, head_dim=16, layer_types=["full_attention", "linear_attention"]
        ),
        attn_implementation="miles",
    )
    with pytest.raises(CheckpointError, match="layer 1 of MiniMaxForCausalLM is of type linear_attention"):
        prepare(model)


def test_unknown_indexers_are_refused():
    class OtherIndexer(nn.Module):
        pass

    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(**COMMON), attn_implementation="miles"
    )
    model.model.layers[1].self_attn.indexer = OtherIndexer()
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.indexer"):
        prepare(model)
