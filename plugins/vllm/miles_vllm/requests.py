"""Converts requests to arguments of vLLM's ``SamplingParams``, and its answers to responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.engine import Request, Response
from miles_core.plugin import MilesError
from miles_workers import ROUTED_EXPERTS, Routing

#: Largest temperature that vLLM accepts.
HOTTEST = 2.0


@dataclass(frozen=True)
class Translator:
    """Converts requests and responses of one engine.

    Attributes:
        detokenize: converts token ids to text without special tokens.
        max_context: maximum tokens of prompt and response together.
        routing: conversion of the routed experts; None if vLLM does not record them.
    """

    detokenize: Callable[[list[int]], str]
    max_context: int
    routing: Routing | None = None

    def parameters(self, request: Request) -> dict[str, Any]:
        """Return arguments of ``SamplingParams``.

        Raises:
            MilesError: the prompt is empty or too long, or the engine does not record a requested field.
        """
        fields = {ROUTED_EXPERTS} if self.routing else set[str]()
        if unknown := sorted(request.extras - fields):
            raise MilesError(
                f"vLLM does not record {unknown[0]}; with these options it records {', '.join(fields) or 'nothing'}"
            )
        if request.media:
            raise MilesError("a request has images, and this engine passes text only to vLLM; use --engine embedded")
        sampling = request.sampling
        if sampling.temperature > HOTTEST:
            raise MilesError(
                f"vLLM samples at temperatures up to {HOTTEST:g}, not {sampling.temperature:g}; use --engine embedded"
            )
        return {
            "max_tokens": request.room(self.max_context),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "detokenize": bool(sampling.stop),  # the text is made here
            "logprobs": 0,  # of the sampled token only
        }

    def response(self, request: Request, answer: Mapping[str, Any], version: int) -> Response:
        """Convert vLLM's answer to a response that ``version`` of the weights sampled."""
        tokens, extras, routing = answer["tokens"], dict[str, Any](), self.routing
        if routing is not None and ROUTED_EXPERTS in request.extras and answer["routes"] is not None:
            rows = routing.column(answer["routes"])
            # a request that is aborted between two steps may have more tokens than recorded rows
            tokens = tokens[: max(len(rows) + 1 - len(request.tokens), 0)]
            extras[ROUTED_EXPERTS] = rows[: len(request.tokens) + len(tokens) - 1]
        ids = tokens.tolist()
        text = self.detokenize(ids)
        text = text[: min((text.index(stop) for stop in request.sampling.stop if stop in text), default=len(text))]
        versions = [(0, version)] if ids else []
        metrics = {"cached_tokens": float(answer["cached_tokens"])}
        log_probs = answer["log_probs"][: len(ids)].tolist()
        return Response(ids, log_probs, answer["finish"], text, versions, extras, metrics)


#: Arguments of ``SamplingParams`` that score a prompt: vLLM computes its log-probabilities at temperature 1.
SCORING = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
