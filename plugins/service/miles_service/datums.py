"""Converts a client's training data to samples, and what was computed for samples to arrays of the client's shape.

A datum has ``model_input`` [n] and ``target_tokens`` [n], the next token at each position, so its text is ``model_input`` plus the last
target. The other inputs are [n], too: ``weights`` of ``cross_entropy``; ``logprobs`` (of the policy that sampled) and ``advantages`` of the other
losses. Only positions that can matter are computed: for ``cross_entropy`` and ``dro`` all, otherwise those where ``logprobs`` or ``advantages``
is not 0. The log-probability of another position is returned as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from miles_core.data import Sample
from miles_core.plugin import DataError

#: Inputs of a datum by loss, besides ``target_tokens``; the client's name -> the field of a sample.
_RL = {"logprobs": "old_log_probs", "advantages": "advantages"}
INPUTS = {
    "cross_entropy": {"weights": "loss_weight"},
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), _RL),
}
#: Inputs that the client's examples add for its own use.
IGNORED = ("mask",)


@dataclass(frozen=True)
class Batch:
    """Samples of one request.

    Attributes:
        samples: one per datum.
        lengths: n of each datum.
    """

    samples: list[Sample]
    lengths: list[int]

    def align(self, log_probs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Convert values of response tokens to one array [n] per datum, with 0 before the response."""
        return [
            np.concatenate([np.zeros(n - len(own), np.float32), own])
            for n, own in zip(self.lengths, log_probs, strict=True)
        ]


def make_batch(data: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]], loss: str) -> Batch:
    """Make the samples of a request.

    Raises:
        DataError: a datum lacks an input, has one of another length or kind, or trains a token that is not the next one.
    """
    groups: dict[bytes, int] = {}
    samples = [_sample(number, tokens, inputs, loss, groups) for number, (tokens, inputs) in enumerate(data)]
    return Batch(samples, [len(tokens) for tokens, _ in data])


def _sample(
    number: int, tokens: np.ndarray, inputs: Mapping[str, np.ndarray], loss: str, groups: dict[bytes, int]
) -> Sample:
    known, n = INPUTS[loss], len(tokens)
    if unknown := sorted({*inputs} - {"target_tokens", *known, *IGNORED}):
        raise DataError(f"datum {number} has the input {unknown[0]}, which {loss} does not read; leave it out")
    for name in ("target_tokens", *known):
        if name not in inputs and name != "weights":
            raise DataError(f"datum {number} has no {name}, which the loss {loss} reads")
        if name in inputs and inputs[name].shape != (n,):
            raise DataError(
                f"datum {number}: {name} has the shape {list(inputs[name].shape)}, and model_input has {n} tokens; one value per token is "
                "supported"
            )
    if not n:
        raise DataError(f"datum {number} has no tokens")
    targets = inputs["target_tokens"].astype(np.int64)
    columns = {field: inputs[name].astype(np.float32) for name, field in known.items() if name in inputs}
    trained = next((columns[f] for f in ("loss_weight", "advantages") if f in columns), np.ones(n)) != 0
    text = np.append(tokens.astype(np.int64), targets[-1])
    follows = targets == text[1:]
    if (wrong := np.flatnonzero(trained & ~follows)).size:
        at = int(wrong[0])
        raise DataError(
            f"datum {number}: target_tokens[{at}] is {targets[at]}, and the next token of model_input is {text[at + 1]}; only the next token can "
            "be trained"
        )
    wanted = follows if loss in ("cross_entropy", "dro") else follows & (trained | (columns["old_log_probs"] != 0))
    start = int(np.argmax(wanted)) if wanted.any() else n - 1
    group = groups.setdefault(text[: start + 1].tobytes(), len(groups))  # the trainer computes a common prompt once
    return Sample(
        tokens=text.tolist(),
        response_length=n - start,
        loss_mask=wanted[start:].astype(np.int8).tolist(),
        group_index=group,
        index=number,
        fields={name: column[start:] for name, column in columns.items()},
    )
