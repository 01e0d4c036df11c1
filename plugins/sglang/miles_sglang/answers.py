"""The result of SGLang's ``generate`` with its long columns as arrays.

SGLang returns lists of tuples and base64 text. SGLang's process sends the arrays as bytes after the JSON message: encoding them as
JSON took as long as tens of decode steps when the responses of a rollout ended together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_sglang.retraction import VERSIONS

try:
    from pybase64 import b64decode  # a dependency of SGLang that decodes expert records several times faster
except ImportError:  # the run's own process decodes nothing
    from base64 import b64decode

#: Keys of ``meta_info`` that are copied unchanged.
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
    """The result of one request.

    Attributes:
        meta: scalar entries of ``meta_info``.
        columns: the requested columns: ``tokens`` int32 [T]; ``log_probs`` float32 [T], normalised over the vocabulary;
            ``prompt_log_probs`` float32, without the first token; ``support`` int32, the supports of all positions concatenated,
            with ``support_sizes`` int32 [T] and ``support_log_probs`` float32 [T]; ``routes``, layers and experts flattened;
            ``versions`` int32 [T], the weight version of each token.
    """

    meta: Mapping[str, Any]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def from_sglang(cls, given: Mapping[str, Any], routes: str = "int32") -> Answer:
        """Convert SGLang's dictionary with ``output_ids`` and ``meta_info``. routes: dtype of the routed experts."""
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
            columns["routes"] = np.frombuffer(b64decode(meta["routed_experts"]), routes)
        if VERSIONS in meta:
            columns["versions"] = np.array(meta[VERSIONS], np.int32)
        return cls({name: meta[name] for name in _META if name in meta}, columns)

    def message(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Serialise into JSON-compatible data and the bytes of the columns; ``read`` is the inverse."""
        columns = {name: (column.dtype.str, len(column)) for name, column in self.columns.items()}
        return {"meta": self.meta, "columns": columns}, [c.view(np.uint8).data for c in self.columns.values()]

    @classmethod
    def read(cls, message: Mapping[str, Any], payload: bytes) -> Answer:
        """Deserialise what ``message`` returned; payload: the concatenated bytes of the columns."""
        columns, at = {}, 0
        for name, (dtype, count) in message["columns"].items():
            columns[name] = np.frombuffer(payload, dtype, count, at)
            at += columns[name].nbytes
        return cls(message["meta"], columns)

    def supports(self) -> Sequence[NDArray[np.int32]]:
        """Return the sampling support of each position; empty if the request did not ask for supports."""
        if "support" not in self.columns:
            return []
        return np.split(self.columns["support"], np.cumsum(self.columns["support_sizes"])[:-1])
