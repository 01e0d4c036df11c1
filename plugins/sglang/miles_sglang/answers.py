"""An answer of SGLang's ``generate``, its long columns as arrays.

SGLang gives lists of tuples and base64. Arrays travel from its process as bytes beside the message: written as JSON they took as
long as tens of decode steps for a rollout whose responses end together.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: What else of a response's ``meta_info`` is used.
_META = (
    "finish_reason",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_correct_drafts_histogram",
)


@dataclass(frozen=True)
class Answer:
    """What came back for one request.

    Attributes:
        meta: the plain rest of ``meta_info``.
        columns: ``tokens`` int32 [T]; ``log_probs`` float32 [T] over the vocabulary; ``prompt_log_probs`` float32, nothing for
            the first token; ``support`` int32, of all positions in a row, with ``support_sizes`` int32 [T] and
            ``support_log_probs`` float32 [T]; ``routes``, layers and experts flat. Only those that were asked for.
    """

    meta: Mapping[str, Any]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], routes: str = "int32") -> Answer:
        """From what SGLang gives, ``output_ids`` and ``meta_info``, with routed experts in the dtype ``routes``."""
        meta = given["meta_info"]
        columns = {"tokens": np.array(given["output_ids"], np.int32)}
        for name, entries in (
            ("log_probs", meta.get("output_token_logprobs")),
            ("prompt_log_probs", (meta.get("input_token_logprobs") or ())[1:]),
        ):
            if entries:
                columns[name] = np.array([entry[0] for entry in entries], np.float32)
        if (rows := meta.get("output_token_sampling_mask")) is not None:
            columns["support"] = np.array([token for row in rows for token in row], np.int32)
            columns["support_sizes"] = np.array([len(row) for row in rows], np.int32)
            columns["support_log_probs"] = np.array(meta.get("output_token_sampling_logprobs") or (), np.float32)
        if meta.get("routed_experts"):
            columns["routes"] = np.frombuffer(base64.b64decode(meta["routed_experts"]), routes)
        return cls({name: meta[name] for name in _META if name in meta}, columns)

    def message(self) -> tuple[dict[str, Any], list[memoryview]]:
        """What ``read`` takes: plain data, and the columns' bytes."""
        columns = {name: (column.dtype.str, len(column)) for name, column in self.columns.items()}
        return {"meta": self.meta, "columns": columns}, [c.view(np.uint8).data for c in self.columns.values()]

    @classmethod
    def read(cls, message: Mapping[str, Any], payload: bytes) -> Answer:
        """The answer of a ``message``."""
        columns, at = {}, 0
        for name, (dtype, count) in message["columns"].items():
            columns[name] = np.frombuffer(payload, dtype, count, at)
            at += columns[name].nbytes
        return cls(message["meta"], columns)

    def supports(self) -> Sequence[NDArray[np.int32]]:
        """The support of each position; none where they were not asked for."""
        if "support" not in self.columns:
            return []
        return np.split(self.columns["support"], np.cumsum(self.columns["support_sizes"])[:-1])
