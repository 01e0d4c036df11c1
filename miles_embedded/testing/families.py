"""Tiny random checkpoints of many model families, and comparisons of the embedded backend with Transformers.

``compare`` runs one checkpoint in engine and trainer: packed scores, greedy generation with shared prompts, gradients and export. The
tests and the table of ``docs/families.md`` use it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from miles_core.contracts.engine import Request, Sampling
from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.plugin.detect import config_facts
from miles_core.plugin.facts import Facts
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.runner import Runner
from miles_embedded.engine.settings import Settings
from miles_embedded.manifest import review
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.load import kind_of, load_model
from miles_embedded.model.views import export
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing import tiny

_COMMON = {k: v for k, v in tiny.FAMILIES["qwen3"][1].items() if k != "head_dim"}
_HEADS = {**_COMMON, "head_dim": 16}
_LATENT = {
    k: v for k, v in tiny.FAMILIES["deepseek_v3"][1].items() if not k.startswith(("n_", "moe_", "num_experts", "topk"))
}
_INDEXED = {k: v for k, v in tiny.FAMILIES["deepseek_v32"][1].items() if k != "num_local_experts"}
_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
_GEMMA4 = tiny.ROUTER_FAMILIES["gemma4"][1]
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {**_TOWER, "image_size": 28, "patch_size": 14}
_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_QWEN_IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def _sections(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


#: family -> (name of the configuration class, its arguments). Windows, chunks and indexer choices are shorter than the sequences.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **tiny.FAMILIES,
    **tiny.ROUTER_FAMILIES,
    "qwen2": ("Qwen2Config", _COMMON),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_COMMON, **_MOE, "use_sliding_window": True, "sliding_window": 5, "shared_expert_intermediate_size": 16},
    ),
    "mistral": ("MistralConfig", {**_COMMON, "sliding_window": 5}),
    "ministral3": ("Ministral3Config", _HEADS),
    "gemma": ("GemmaConfig", _HEADS),
    "gemma2": (
        "Gemma2Config",
        {
            **_HEADS,
            **_ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": ("Gemma3TextConfig", {**_HEADS, **_ALTERNATING}),
    "granite": (
        "GraniteConfig",
        {
            **_COMMON,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    "cohere": ("CohereConfig", {**_COMMON, "logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", {**_COMMON, **_ALTERNATING, "logit_scale": 0.25}),
    "minicpm3": ("MiniCPM3Config", {**_LATENT, "dim_model_base": 16, "scale_emb": 3, "scale_depth": 1.4}),
    "hyperclovax": ("HyperCLOVAXConfig", {**_COMMON, "logits_scaling": 0.25}),
    "phi3": ("Phi3Config", {**_COMMON, "original_max_position_embeddings": 16, "rope_parameters": _LONG}),
    "llama, longrope": ("LlamaConfig", {**_COMMON, "rope_parameters": _LONG}),
    "llama, dynamic": (
        "LlamaConfig",
        {
            **_COMMON,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "phimoe": ("PhimoeConfig", {**_COMMON, **_LOCAL_MOE}),
    "glm4": ("Glm4Config", _HEADS),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**_INDEXED, "indexer_types": ["full", "shared"]}),
    "olmo2": ("Olmo2Config", _COMMON),
    "olmoe": ("OlmoeConfig", {**_COMMON, "num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3Config", _COMMON),
    "starcoder2": ("Starcoder2Config", {**_COMMON, "sliding_window": None}),
    "ernie4_5": ("Ernie4_5Config", _COMMON),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", _HEADS),
    "seed_oss": ("SeedOssConfig", _HEADS),
    "qwen3_next": ("Qwen3NextConfig", {**_HEADS, **_MOE, **_DELTA, "shared_expert_intermediate_size": 16}),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**_HEADS, **_DELTA}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**_HEADS, **_MOE, **_DELTA, "shared_expert_intermediate_size": 16}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "olmo_hybrid": ("OlmoHybridConfig", {**_COMMON, **_DELTA, "linear_num_key_heads": 4}),
    "lfm2": ("Lfm2Config", {**_COMMON, "layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**_COMMON, **_MOE, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "falcon_h1": ("FalconH1Config", {**_HEADS, **_MAMBA, "mamba_d_ssm": 32, "mamba_d_head": 8}),
    "bamba": ("BambaConfig", {**_COMMON, **_MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_COMMON,
            **_LOCAL_MOE,
            **_MAMBA,
            "shared_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {**_HEADS, **_ALTERNATING},
            "vision_config": _IMAGE,
            "mm_tokens_per_image": 4,
            "image_token_index": 60,
            "boi_token_index": 61,
            "eoi_token_index": 62,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4, with towers": (
        "Gemma4Config",
        {
            "text_config": _GEMMA4,
            "vision_config": {**_TOWER, "head_dim": 16, "num_key_value_heads": 2},
            "audio_config": None,
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": {**_HEADS, "model_type": "mistral"},
            "vision_config": {**_IMAGE, "head_dim": 16, "model_type": "pixtral"},
            "image_token_index": 60,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLConfig",
        {
            "text_config": {**_COMMON, **_sections(1, 1, 2)},
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1},
            **_QWEN_IDS,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": {**_COMMON, **_sections(1, 1, 2)},
            "vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [0]},
            **_QWEN_IDS,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": {**_HEADS, **_sections(2, 3, 3)},
            "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **_QWEN_IDS,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {**_HEADS, **_MOE, **_sections(2, 3, 3)},
            "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **_QWEN_IDS,
        },
    ),
    "llama4, with towers": (
        "Llama4Config",
        {
            "text_config": tiny.ROUTER_FAMILIES["llama4"][1],
            "vision_config": {**_IMAGE, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            "image_token_index": 60,
        },
    ),
}


def lacking(family: str) -> str:
    """Return why the plan refuses a family of this table with the installed Transformers; "" if it does not."""
    model = {"model_type": family.partition(",")[0]}
    return "; ".join(f"{p.headline}: {p.because}" for p in review(Facts(config_facts(model)), model).problems)


def family_checkpoint(family: str, directory: str | Path, seed: int = 0) -> Path:
    """Save a tiny random checkpoint like ``tiny_checkpoint``, for the families of this file."""
    import transformers

    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**values)
    return tiny.random_checkpoint(config, directory, seed)


@dataclass(frozen=True)
class Comparison:
    """Differences between the embedded backend and Transformers for one checkpoint, in FP32.

    Attributes:
        score: largest difference of log-probs of packed sequences, in nats.
        greedy: largest gap between the most likely and the greedily chosen token, or largest error of its log-prob, in nats.
        gradient: largest difference of a parameter's gradient, relative to the gradient's largest entry.
        export: whether the exported tensors equal the checkpoint's bit for bit.
    """

    score: float
    greedy: float
    gradient: float
    export: bool


def compare(checkpoint: str | Path, recompute: bool = False) -> Comparison:
    """Compare engine and trainer with Transformers' own code.

    Args:
        checkpoint: checkpoint of a tiny model with 64 token ids.
        recompute: train with activation checkpointing.
    """
    model, reference = load_model(checkpoint, "float32"), _reference(checkpoint)
    stored = load_file(Path(checkpoint) / "model.safetensors")
    exported = {name: tensor for unit in export(model) for name, tensor in unit.tensors.items()}
    same = exported.keys() == stored.keys() and all(torch.equal(exported[n], stored[n]) for n in stored)
    score, greedy = _compare_generation(
        EmbeddedEngine(model, Settings(str, eos=[], max_running_requests=3, max_context=64)), reference
    )
    return Comparison(score, greedy, _compare_gradients(model, reference, recompute), same)


def score_gap(checkpoint: str | Path) -> float:
    """Return the largest difference, in nats, of the log-probs of three sequences scored by the engine in one call."""
    reference, runner = _reference(checkpoint), Runner(load_model(checkpoint, "float32"))
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(2, 50, (n,), generator=generator).tolist() for n in (23, 9, 17)]
    worst = 0.0
    for tokens, scored in zip(sequences, runner.score(sequences, 1.0), strict=True):
        with torch.no_grad():
            right = expected_log_probs(reference, tokens).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        worst = max(worst, float((torch.from_numpy(scored) - right).abs().max()))
    return worst


def _reference(checkpoint: str | Path) -> Any:
    import transformers

    auto = kind_of(transformers.AutoConfig.from_pretrained(checkpoint))
    return auto.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


def expected_log_probs(reference: Any, tokens: Sequence[int]) -> Tensor:
    """Return [len - 1, vocabulary] log-probs of the token after each one, computed by Transformers alone.

    With length-dependent rotary frequencies they are those of Transformers' generation: with ``longrope`` from a sequence that ends
    there, with ``dynamic`` after cached keys.
    """
    ids = torch.tensor([tokens])
    switch = rope_switch(reference)
    if switch and len(tokens) - 1 > switch:
        short, long = (reference(input_ids=ids[:, :n]).logits[0] for n in (switch, len(tokens) - 1))
        return torch.cat([short, long[switch:]]).log_softmax(-1)
    rope = getattr(reference.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") != "dynamic":
        return reference(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
    for module in reference.modules():
        if hasattr(
            module, "original_inv_freq"
        ):  # releases before 5.13 do not reset the frequencies after a long sequence
            module.inv_freq = module.original_inv_freq.clone()
    cache, rows = None, []
    for token in tokens[:-1]:
        out = reference(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0])
    return torch.cat(rows).log_softmax(-1)


def _compare_generation(engine: EmbeddedEngine, reference: Any) -> tuple[float, float]:
    """Generate with rows that share prompts, join and leave, and prompts shorter and longer than the windows."""
    prompts = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15]]
    requests = [
        Request(p, Sampling(n, temperature=0.0, ignore_eos=True), key=10 * i + n)
        for i, p in enumerate(prompts)
        for n in (5, 17)
    ]

    async def main() -> tuple[list[Any], list[Any]]:
        responses = await asyncio.gather(*[engine.generate(r) for r in requests])
        whole = [r.tokens + o.tokens for r, o in zip(requests, responses, strict=True)]
        return responses, await engine.score(whole)

    responses, scores = asyncio.run(main())
    placeholders = _placeholders(reference)
    score = greedy = 0.0
    for request, response, scored in zip(requests, responses, scores, strict=True):
        tokens = request.tokens + response.tokens
        # Transformers replaces the embedding of a placeholder for an image: what follows one is not text
        end = next((i + 1 for i, token in enumerate(tokens) if token in placeholders), len(tokens))
        tokens, scored = tokens[:end], scored[: end - 1]
        with torch.no_grad():
            rows = expected_log_probs(reference, tokens)
        right = rows.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        score = max(score, float((torch.from_numpy(scored) - right).abs().max()))
        taken = slice(len(request.tokens) - 1, None)
        less = (rows[taken].max(1).values - right[taken]).max()
        log_probs = torch.tensor(response.log_probs)[: end - len(request.tokens)]
        off = (log_probs - right[taken]).abs().max()
        greedy = max(greedy, float(less), float(off))
    return score, greedy


def _placeholders(model: Any) -> set[int]:
    """Return the token ids that a model with towers replaces by images, sounds and videos."""
    config = model.config.to_dict()
    names = [n for n in config if re.search(r"^(bo|eo)[aiv]_|image|video|audio|vision|speech", n)]
    return {config[n] for n in names if n.endswith(("_token_id", "_token_index")) and isinstance(config[n], int)}


def small_groups() -> list[Sample]:
    """Make six random samples of three prompts, of text tokens: tiny configurations have placeholders for images from 50."""
    generator = torch.Generator().manual_seed(3)
    found: list[Sample] = []
    for group, (prompt, responses) in enumerate([(9, (12, 3)), (4, (17,)), (14, (6, 8, 1))]):
        head = torch.randint(2, 50, (prompt,), generator=generator).tolist()
        for length in responses:
            tail = torch.randint(2, 50, (length,), generator=generator).tolist()
            found.append(Sample(tokens=head + tail, response_length=length, group_index=group, index=len(found)))
    return found


def _compare_gradients(model: nn.Module, reference: Any, recompute: bool) -> float:
    """Compare gradients of a packed micro-batch with shared prompts with those of one forward per sample."""
    trainer = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig(), recompute=recompute))
    trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))  # type: ignore[arg-type]
    batch = collate(small_groups())
    micro, ctx = trainer.prepare(batch, list(range(len(batch))), "train", False)
    output = trainer.forward(model, micro, ctx)
    assert output.log_probs is not None
    coefficients = torch.randn(len(micro.tokens), generator=torch.Generator().manual_seed(4))
    (output.log_probs * coefficients).sum().backward()
    for start, length, prompt in zip(
        *(x.tolist() for x in (micro.starts, micro.lengths, micro.prompt_lengths)), strict=True
    ):
        tokens = micro.tokens[start : start + length]
        rows = expected_log_probs(reference, tokens.tolist()).gather(1, tokens[1:, None])[prompt - 1 :, 0]
        (rows * coefficients[start + prompt : start + length]).sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    worst = 0.0
    greatest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            largest = float(parameter.grad.abs().max())
            own = found.pop(name, torch.zeros_like(parameter))
            # for some parameters (key biases) the exact gradient is 0
            worst = max(worst, float((own - parameter.grad).abs().max()) / max(largest, 1e-4 * greatest))
    return worst if not found else float("inf")
