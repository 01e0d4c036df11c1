"""Converts requests to bodies of SGLang's ``generate``, and its answers to responses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.data import SAMPLING_SUPPORT, Media
from miles_core.engine import Request, Response, Sampling
from miles_core.plugin import MilesError
from miles_sglang.answers import Answer
from miles_sglang.images import ImageReader
from miles_workers import ROUTED_EXPERTS, Routing

_NOTHING = np.zeros(0, np.float32)

#: Maximum size of a sampling support if the request has no top-k; SGLang requires a finite top-k to return supports.
SUPPORT_CAP = 4096


def score_body(tokens: Sequence[int], rid: str) -> dict[str, Any]:
    """Return the body of ``generate`` that scores the tokens at temperature 1."""
    return {
        "rid": rid,
        "input_ids": [int(t) for t in tokens],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


@dataclass(frozen=True)
class Translator:
    """Converts requests and responses of one engine.

    Attributes:
        detokenize: converts token ids to text without special tokens.
        max_context: maximum tokens of prompt and response together.
        vocab_size: vocabulary size of the model.
        routing: conversion of the routed experts; None if SGLang does not record them.
        supports: whether SGLang can return sampling supports.
        seed: the run's seed for keyed sampling; None if SGLang seeds its sampling itself.
        versioned: whether SGLang's schedulers record the weight version of each token.
        images: reads the images of requests; None if the run passes text only.
    """

    detokenize: Callable[[list[int]], str]
    max_context: int
    vocab_size: int
    routing: Routing | None = None
    supports: bool = True
    seed: int | None = None
    versioned: bool = False
    images: ImageReader | None = None

    @property
    def fields(self) -> set[str]:
        """Names of the extra fields that requests may ask for."""
        return ({ROUTED_EXPERTS} if self.routing else set()) | ({SAMPLING_SUPPORT.name} if self.supports else set())

    def body(self, request: Request, rid: str) -> dict[str, Any]:
        """Return the body of ``generate`` for a request with the id ``rid``.

        Raises:
            MilesError: the prompt is empty or too long, or the engine does not record a requested field.
        """
        if unknown := sorted(request.extras - self.fields):
            raise MilesError(
                f"SGLang does not record {unknown[0]}; with these options it records {', '.join(sorted(self.fields)) or 'nothing'}"
            )
        return {
            "rid": rid,
            "input_ids": list(request.tokens),
            "sampling_params": self._sampling(request, request.room(self.max_context)),
            "return_logprob": True,
            "return_sampling_mask": SAMPLING_SUPPORT.name in request.extras,
            "return_routed_experts": self.routing is not None and ROUTED_EXPERTS in request.extras,
            **self._images(request.tokens, request.media),
        }

    def score_body(self, tokens: Sequence[int], media: tuple[Media, ...], rid: str) -> dict[str, Any]:
        """Return the body of ``generate`` that scores the tokens.

        Raises:
            MilesError: see ``ImageReader.find``, or the run passes text only.
        """
        return {**score_body(tokens, rid), **self._images(tokens, media)}

    def _images(self, tokens: Sequence[int], media: tuple[Media, ...]) -> dict[str, Any]:
        if not media:
            return {}
        if self.images is None:
            raise MilesError("a request has images, and this engine was built for text; start the run with --media")
        return {"image_data": self.images.find(tokens, media)}

    def _sampling(self, request: Request, max_new_tokens: int) -> dict[str, Any]:
        sampling = request.sampling
        parameters = {
            "max_new_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": self._top_k(sampling, SAMPLING_SUPPORT.name in request.extras),
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
        }
        if self.seed is not None:
            parameters["sampling_seed"] = seed_of(self.seed, request.key)
        return parameters

    def _top_k(self, sampling: Sampling, support: bool) -> int:
        """Return the top-k to send. SGLang returns supports only for a finite top-k: the vocabulary size, at most SUPPORT_CAP."""
        if sampling.top_k > 0 or not support:
            return sampling.top_k
        return min(self.vocab_size, SUPPORT_CAP)

    def response(self, request: Request, answer: Answer, sent_limit: int) -> Response:
        """Convert SGLang's answer to a response.

        Args:
            request: the request.
            answer: SGLang's answer.
            sent_limit: ``max_new_tokens`` of the body.

        Raises:
            MilesError: SGLang stopped before ``sent_limit`` because its cache is too small.
        """
        meta, columns = answer.meta, answer.columns
        tokens: list[int] = columns["tokens"].tolist()
        reason = meta["finish_reason"] or {"type": "abort"}
        finish = reason["type"]
        if finish == "length" and len(tokens) < sent_limit:
            raise MilesError(
                f"SGLang stopped a response of at most {sent_limit} tokens after {len(tokens)}: prompt and response do not fit "
                "into its cache; raise --sglang-mem-fraction-static, or lower --rollout-max-response-len"
            )
        count = len(tokens)
        if request.sampling.ignore_eos and (at := _first(tokens, request.sampling.stop_token_ids)) is not None:
            count, finish = at + 1, "stop"  # with ignore_eos, SGLang ignores stop tokens too
        versions = self._versions(answer, count, finish)
        count = len(versions)
        extras = self._extras(request, answer, count)
        if ROUTED_EXPERTS in extras:  # a request aborted between two steps may have one token more than recorded rows
            count = min(count, len(extras[ROUTED_EXPERTS]) + 1 - len(request.tokens))
        tokens = tokens[:count]
        support = SAMPLING_SUPPORT.name in request.extras
        found = columns.get("support_log_probs" if support else "log_probs", _NOTHING)
        matched = reason.get("matched") if finish == "stop" else None
        text = self._text(tokens, matched if isinstance(matched, str) else None)
        metrics = self._metrics(request, meta, extras)
        return Response(tokens, found[:count].tolist(), finish, text, _spans(versions[:count]), extras, metrics)

    def _versions(self, answer: Answer, count: int, finish: str) -> NDArray[Any]:
        """Return the weight version of each token, int32 [count]. It is shorter for a request that was aborted in SGLang's queue.

        Raises:
            MilesError: SGLang's schedulers did not report versions.
        """
        if not self.versioned:
            return np.full(count, int(answer.meta["weight_version"]), np.int32)
        versions = answer.columns.get("versions", _NOTHING)[:count]
        if len(versions) < count and finish != "abort":
            raise MilesError(
                f"SGLang reported weight versions for {len(versions)} of {count} tokens; reinstall miles-plugin-sglang, whose code records "
                "them in SGLang's schedulers"
            )
        return versions

    def _text(self, tokens: list[int], stop: str | None) -> str:
        text = self.detokenize(tokens)
        return text if stop is None or stop not in text else text[: text.index(stop)]

    def _extras(self, request: Request, answer: Answer, count: int) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if SAMPLING_SUPPORT.name in request.extras:
            extras[SAMPLING_SUPPORT.name] = list(answer.supports()[:count])
        if self.routing is not None and ROUTED_EXPERTS in request.extras and "routes" in answer.columns:
            rows = self.routing.column(answer.columns["routes"])
            extras[ROUTED_EXPERTS] = rows[: len(request.tokens) + count - 1]
        return extras

    def _metrics(self, request: Request, meta: Mapping[str, Any], extras: dict[str, Any]) -> dict[str, float]:
        metrics = {"cached_tokens": float(meta.get("cached_tokens") or 0)}
        if meta.get("spec_verify_ct"):
            metrics |= _acceptance(meta)
        rows = extras.get(SAMPLING_SUPPORT.name)
        if rows is not None:
            cut = request.sampling.top_k <= 0 and self.vocab_size > SUPPORT_CAP
            metrics[f"{SAMPLING_SUPPORT.name}_capped"] = float(sum(len(r) >= SUPPORT_CAP for r in rows) if cut else 0)
        return metrics


def _spans(versions: NDArray[Any]) -> list[tuple[int, int]]:
    """Convert the version of each token to (index of the first token of the version, version)."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    return list(zip(starts.tolist(), versions[starts].tolist(), strict=True))


def seed_of(run_seed: int, key: int) -> int:
    """Return a request's 63-bit seed for SGLang. It is a hash, so that neighbouring keys and run seeds give unrelated seeds."""
    digest = hashlib.blake2b(f"{run_seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _acceptance(meta: Mapping[str, Any]) -> dict[str, float]:
    """Return draft metrics of a request: verification steps, drafted tokens, accepted drafts, tokens per step, acceptance rate, and
    the share of steps that accepted at least d drafts for each depth d."""
    steps, counts = meta["spec_verify_ct"], meta.get("spec_correct_drafts_histogram") or ()
    drafted, kept = meta.get("spec_num_proposed_drafts", 0), meta.get("spec_num_correct_drafts", 0)
    found = {"draft_steps": float(steps), "drafted": float(drafted), "drafts_kept": float(kept)}
    found["accept_length"] = meta["completion_tokens"] / steps
    if drafted:
        found["accept_rate"] = kept / drafted
    return found | {f"accepted_to_{d}": sum(counts[d:]) / sum(counts) for d in range(1, len(counts)) if sum(counts)}


def _first(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    return next((i for i, token in enumerate(tokens) if token in wanted), None)
