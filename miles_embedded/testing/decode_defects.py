"""Defects of an engine that affect only generated tokens; given text is scored correctly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from miles_embedded.engine import sampling as draw
from miles_embedded.engine.attention import DecodeCall
from miles_embedded.model.parts import backbone, decoder_layers
from miles_embedded.testing.defects import Defect

_COLD = {"rollout_temperature": 0.7}
_TRUNCATED = {"rollout_top_p": 0.7}


def _logits(change: Callable[[Tensor, Any], Tensor]) -> Callable[[Any], None]:
    """Change the logits [rows, vocabulary] that tokens are sampled from and reported with."""

    def plant(engine: Any) -> None:
        sample = engine.sample
        engine.sample = lambda logits, rows, *more: sample(change(logits, rows), rows, *more)

    return plant


def _draw_defect(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Change the logits that tokens are sampled from; they are reported with the right ones."""

    def plant(engine: Any) -> None:
        def sample(logits: Tensor, rows: Any, positions: Any = None, stream: int = 0) -> draw.Sampled:
            params, _, recording = engine._parameters(rows)
            u = engine.uniform(rows, positions, stream)
            chosen = draw.sample(change(logits), params, u).tokens
            return draw.record(draw.distribution(logits, params), torch.tensor(chosen), recording)

        engine.sample = sample

    return plant


def _reported(change: Callable[[float], float]) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        sample = engine.sample

        def changed(*args: Any) -> draw.Sampled:
            found = sample(*args)
            return replace(found, log_probs=[change(p) for p in found.log_probs])

        engine.sample = changed

    return plant


def _while_decoding(change: Callable[[Any, Tensor, Tensor, Any], Tensor]) -> Callable[[Any], None]:
    """Replace the computation of decode steps."""

    def plant(engine: Any) -> None:
        run = engine.runner.run

        def changed(ids: Tensor, positions: Tensor, call: Any, inputs: Any = None) -> Tensor:
            if not isinstance(call, DecodeCall):
                found: Tensor = run(ids, positions, call, inputs)
                return found
            return change(run, ids, positions, call)

        engine.runner.run = changed

    return plant


def _scaled_attention(engine: Any) -> None:
    layers: list[Any] = [layer.self_attn for layer in decoder_layers(engine.model)]

    def step(run: Any, ids: Tensor, positions: Tensor, call: Any) -> Tensor:
        for layer in layers:
            layer.scaling *= 1.05
        try:
            found: Tensor = run(ids, positions, call)
            return found
        finally:
            for layer in layers:
                layer.scaling /= 1.05

    _while_decoding(step)(engine)


def _without_last_norm(engine: Any) -> None:
    norm: Any = backbone(engine.model).norm
    _while_decoding(lambda run, *args: run(*args) / norm.weight)(engine)


def _one_token(logits: Tensor, rows: Any) -> Tensor:
    raised = logits.clone()
    raised[:, 20] += 2
    return raised


def _repetition(logits: Tensor, rows: Any) -> Tensor:
    changed = logits.clone()
    for row, own in zip(rows, changed, strict=True):
        seen = torch.tensor(sorted(set(row.tokens)))
        own[seen] = torch.where(own[seen] > 0, own[seen] / 1.1, own[seen] * 1.1)
    return changed


def _minimum(logits: Tensor) -> Tensor:
    probabilities = logits.float().softmax(-1)
    return logits.masked_fill(probabilities < 0.1 * probabilities.max(-1, keepdim=True).values, -100.0)


def _second_best(engine: Any) -> None:
    sample = engine.sample

    def changed(logits: Tensor, rows: Any, *more: Any) -> draw.Sampled:
        found = sample(logits, rows, *more)
        best = logits.float().topk(2, -1)
        full = logits.float().log_softmax(-1)
        for i, row in enumerate(rows):
            if row.request.sampling.temperature == 0:
                found.tokens[i] = int(best.indices[i, 1])
                found.log_probs[i] = float(full[i, found.tokens[i]])
        return found

    engine.sample = changed


def _other_rows(engine: Any) -> None:
    sample = engine.sample
    engine.sample = lambda logits, rows, *more: sample(
        logits if len(rows) < 2 else torch.cat([logits[:-1], logits[:1]]), rows, *more
    )


#: Those that outside reviews named.
NAMED = (
    Defect("generated: logits x 1.05", "qwen3", _logits(lambda logits, rows: logits * 1.05), generating=True),
    Defect("generated: one token's logit + 2", "qwen3", _logits(_one_token), generating=True),
    Defect("generated: rotary position + 1", "qwen3", _while_decoding(lambda run, ids, at, call: run(ids, at + 1, call)), generating=True),
    Defect("generated: temperature applied twice", "qwen3", _logits(lambda logits, rows: logits / 0.7), {}, True, _COLD),
    Defect("generated: temperature applied twice in draws only", "qwen3", _draw_defect(lambda logits: logits / 0.7), {}, True, _COLD),
)  # fmt: skip

#: Defects of the tokens that an engine generates.
GENERATING = (
    *NAMED,
    Defect("generated: attention scale x 1.05", "llama", _scaled_attention, generating=True),
    Defect("generated: last norm without its factors", "llama", _without_last_norm, generating=True),
    Defect("generated: repetition penalty 1.1", "qwen3", _logits(_repetition), generating=True),
    Defect("generated: improbable tokens cut off", "qwen3", _draw_defect(_minimum), generating=True),
    Defect("generated: temperature ignored in draws", "qwen3", _draw_defect(lambda logits: logits * 0.7), {}, True, _COLD),
    Defect("generated: reported at another temperature", "qwen3", _reported(lambda p: p * 0.7), generating=True),
    Defect("generated: greedy takes the second", "qwen3", _second_best, generating=True),
    Defect("generated: the last row has another's logits", "llama", _other_rows, generating=True),
    Defect("generated: one token's logit + 2 in draws", "qwen3", _draw_defect(lambda logits: _one_token(logits, ())), generating=True),
    Defect("generated: with top-p, reported x 1.1", "qwen3", _reported(lambda p: p * 1.1), {}, True, _TRUNCATED),
)  # fmt: skip
