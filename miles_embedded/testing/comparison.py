"""Comparisons of the embedded backend with Transformers.

``compare`` runs one checkpoint (``testing.families``) in engine and trainer: packed scores, greedy generation with shared prompts, gradients
and export.
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
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.runner import Runner
from miles_embedded.engine.settings import Settings
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.learned_positions import positions_from_padding
from miles_embedded.model.load import kind_of, load_model
from miles_embedded.model.states import use_configured_limit
from miles_embedded.model.views import export
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig


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


def compare(checkpoint: str | Path, recompute: bool = False, device: str = "cpu") -> Comparison:
    """Compare engine and trainer with Transformers' own code.

    Args:
        checkpoint: checkpoint of a tiny model with 64 token ids.
        recompute: train with activation checkpointing.
        device: device of engine and trainer; Transformers' own code runs on the CPU.
    """
    model, reference = load_model(checkpoint, "float32", device), _reference(checkpoint)
    stored = load_file(Path(checkpoint) / "model.safetensors")
    exported = {name: tensor for unit in export(model) for name, tensor in unit.tensors.items()}
    same = exported.keys() == stored.keys() and all(torch.equal(exported[n].cpu(), stored[n]) for n in stored)
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
    reference = auto.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    for module in reference.modules():
        use_configured_limit(module)
    return reference


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
    special = _placeholders(reference)
    if positions_from_padding(reference):
        special.add(reference.config.pad_token_id)
    score = greedy = 0.0
    for request, response, scored in zip(requests, responses, scores, strict=True):
        tokens = request.tokens + response.tokens
        # Transformers replaces the embedding of a placeholder for an image, and some models do not count padding: what follows is not text
        end = next((i + 1 for i, token in enumerate(tokens) if token in special), len(tokens))
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
    (output.log_probs * coefficients.to(micro.tokens.device)).sum().backward()
    for start, length, prompt in zip(
        *(x.tolist() for x in (micro.starts, micro.lengths, micro.prompt_lengths)), strict=True
    ):
        tokens = micro.tokens[start : start + length].cpu()
        rows = expected_log_probs(reference, tokens.tolist()).gather(1, tokens[1:, None])[prompt - 1 :, 0]
        (rows * coefficients[start + prompt : start + length]).sum().backward()
    found = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    worst = 0.0
    greatest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            largest = float(parameter.grad.abs().max())
            own = found.pop(name, torch.zeros_like(parameter))
            # for some parameters (key biases) the exact gradient is 0
            worst = max(worst, float((own - parameter.grad).abs().max()) / max(largest, 1e-4 * greatest))
    return worst if not found else float("inf")
