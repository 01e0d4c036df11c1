"""What the engine said about one sample, over one or several calls.

A multi-turn generation calls the engine several times on growing token lists. Each call reports log-probabilities and
declared fields for the tokens it saw. A record keeps the calls and, when the sample is finished, lays what they reported out
over the sample's tokens. A row already known stays (it was in force when the next token was sampled); a later call only
adds rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.contracts.engine import Response
from miles_core.data.field import Field
from miles_core.data.sample import Sample, Status, rows
from miles_core.errors import DataError

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass
class Call:
    """One engine call: the tokens sent and what came back."""

    sent: list[int]
    response: Response


@dataclass
class Record:
    """The engine calls made for one sample."""

    calls: list[Call] = field(default_factory=list)

    def add(self, sent: list[int], response: Response) -> None:
        """Remember one call."""
        self.calls.append(Call(list(sent), response))

    def finish(self, sample: Sample, declared: tuple[Field, ...]) -> None:
        """Fill what the engine knows into ``sample``: mask, log-probabilities, versions, fields, status.

        Values a custom generation set itself are kept. Calls that are no prefix of the sample's tokens belong to a sibling.
        """
        mine = [
            c for c in self.calls if c.sent + c.response.tokens == sample.tokens[: len(c.sent) + len(c.response.tokens)]
        ]
        if not mine:
            if sample.rollout_log_probs is None and sample.status not in (Status.ABORTED, Status.FAILED):
                raise DataError(
                    f"sample {sample.index}: its tokens do not continue any call of the engine, so they have no "
                    "log-probabilities; set sample.tokens to prompt + generated tokens (never re-tokenise text)"
                )
            return
        first = sample.prompt_length
        mask = np.zeros(sample.response_length, np.int64)
        logs = np.zeros(sample.response_length, np.float64)
        versions: list[tuple[int, int]] = []
        for call in mine:
            at = len(call.sent) - first
            end = at + len(call.response.tokens)
            if at < 0:
                raise DataError(
                    f"sample {sample.index}: the engine generated token {len(call.sent)} of its prompt of {first} tokens"
                )
            if len(call.response.log_probs) != end - at:
                raise DataError(
                    f"sample {sample.index}: the engine returned {len(call.response.log_probs)} log-probabilities for "
                    f"{end - at} tokens; they cannot be told apart, so the sample is of no use"
                )
            mask[at:end] = 1
            logs[at:end] = call.response.log_probs
            versions += [(len(call.sent) + i, v) for i, v in call.response.weight_versions]
        if sample.loss_mask is None and not mask.all():
            sample.loss_mask = mask.tolist()
        if sample.rollout_log_probs is None:
            sample.rollout_log_probs = logs.tolist()
        sample.weight_versions = sample.weight_versions or versions
        if sample.status is Status.PENDING:
            sample.status = _STATUS[mine[-1].response.finish]
        for spec in declared:
            if spec.name not in sample.fields and any(c.response.extras.get(spec.name) is not None for c in mine):
                sample.fields[spec.name] = _assemble(spec, sample, mine)


def _assemble(spec: Field, sample: Sample, calls: list[Call]) -> Any:
    total = rows(spec, len(sample.tokens), sample.response_length)
    offset = sample.prompt_length if spec.align == "response" else 0
    found = [
        (len(call.sent) - offset if spec.align == "response" else 0, call.response.extras[spec.name])
        for call in calls
        if call.response.extras.get(spec.name) is not None
    ]
    if spec.ragged:
        pieces: list[Any] = [np.zeros(0, spec.dtype)] * total
        for start, values in reversed(found):  # the earliest call that knows a row has the last word
            pieces[start : start + len(values)] = [np.asarray(row, spec.dtype) for row in values]
        return pieces
    arrays = [(start, np.asarray(values, spec.dtype)) for start, values in found]
    if len(arrays) == 1 and arrays[0][0] == 0 and len(arrays[0][1]) == total:
        return arrays[0][1]  # one call that knows every row: the usual case
    shape = next((a.shape[1:] for _, a in arrays if len(a)), arrays[0][1].shape[1:])
    out = np.full((total, *shape), spec.pad, spec.dtype)
    for start, array in reversed(arrays):
        if len(array):
            out[start : start + len(array)] = array
    return out
