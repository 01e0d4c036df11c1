"""A batch: samples as flat columns without padding, independent of how they are split into micro-batches.

All samples' tokens are concatenated. A column has one row per token; row t of a sample refers to token t *as a target*
(``log_probs[t] = log p(token t | tokens before it)``), except in fields declared ``token-1``, whose row t refers to token t
*as an input*. Prompt rows of response columns hold the field's padding value, and ``loss_mask`` is 0 there.
A trainer may use any layout of tokens (packed, padded, shared prompts); it reads columns through
``Context.rows`` and returns its results as flat columns.

Reductions over columns take the number of tokens of each sample in ``lengths [samples]``. Their sums use float64 and a fixed order within
each sample, so that a value does not depend on the other samples in the batch or micro-batch.

Metrics are (sum, weight) pairs: they can be added over micro-batches, steps and ranks before a single division at the end. Where a name
ends in ``_max``, the first number is a maximum of values that are never negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_core.data.column import Column, concatenate
from miles_core.data.field import CORE_FIELDS, Field
from miles_core.data.media import Media
from miles_core.data.sample import Sample
from miles_core.errors import describe

#: Columns of core -> attributes of a sample.
_OWN = {"loss_mask": "mask", "rollout_log_probs": "rollout_log_probs"}
_READ = attrgetter(
    "tokens", "response_length", "group_index", "index", "rollout_id", "media", "fields", "loss_mask", "remove_sample"
)
_EMPTY = torch.zeros(0, dtype=torch.int64)


@dataclass
class Ragged:
    """A list of integers per token: row t is ``values[offsets[t]:offsets[t + 1]]``."""

    values: Tensor  # [sum of lengths]
    offsets: Tensor  # [tokens + 1] int64

    def select(self, index: Tensor) -> Ragged:
        """Return the rows ``index`` [n], in that order."""
        lengths = self.offsets.diff().index_select(0, index)
        offsets = torch.zeros(len(index) + 1, dtype=torch.int64, device=self.offsets.device)
        offsets[1:] = lengths.cumsum(0)
        owner = torch.repeat_interleave(torch.arange(len(index), device=index.device), lengths)
        within = torch.arange(int(offsets[-1]), device=index.device) - offsets.index_select(0, owner)
        first = self.offsets.index_select(0, index).index_select(0, owner)
        return Ragged(self.values.index_select(0, first + within), offsets)

    def to(self, device: torch.device | str) -> Ragged:
        """Return a copy on another device."""
        return Ragged(to_device(self.values, device), to_device(self.offsets, device))


@dataclass
class Batch:
    """Samples as flat columns; N samples, T tokens in all.

    Attributes:
        tokens: [T] int64.
        lengths: [N] int64, number of tokens of each sample.
        prompt_lengths: [N] int64.
        group: [N] int64; samples of one prompt share a number.
        rollout: [N] int64; siblings of one rollout share a number.
        columns: name -> [T, ...] tensor or Ragged.
        scalars: name -> [N, ...] tensor.
        index: [N] int64 indexes of the samples.
        media: for each of the N samples its media (``Sample.media``); empty if no sample has any.
        inputs: names of the columns declared ``token`` or ``token-1``. They belong to tokens as inputs, so two tokens are equal
            inputs of a model only if these columns are equal too.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    group: Tensor
    rollout: Tensor
    index: Tensor
    columns: dict[str, Tensor | Ragged] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    media: tuple[tuple[Media, ...], ...] = ()
    inputs: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.lengths)

    def column(self, name: str) -> Tensor:
        """Return a dense column, [T, ...]; KeyError if it is absent."""
        found = self.columns[name]
        assert isinstance(found, Tensor), f"{name} is ragged"
        return found

    def find_column(self, name: str) -> Tensor | None:
        """Return a dense column, [T, ...]; None if it is absent."""
        return self.column(name) if name in self.columns else None

    @property
    def rollout_log_probs(self) -> Tensor:
        """[T] log-probabilities of the engine; zeros if no token of the batch is trained, because samples may then lack them."""
        if "rollout_log_probs" not in self.columns and not bool(self.mask.any()):
            return torch.zeros_like(self.mask)
        return self.column("rollout_log_probs")

    @property
    def starts(self) -> Tensor:
        """[N] index of each sample's first token."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def owner(self) -> Tensor:
        """[T] index of the sample of each token."""
        samples = torch.arange(len(self), device=self.tokens.device)
        return torch.repeat_interleave(samples, self.lengths, output_size=len(self.tokens))

    @property
    def mask(self) -> Tensor:
        """[T] float32: 1 where a token is trained on."""
        return self.column("loss_mask")

    def select(self, samples: Sequence[int] | Tensor) -> Batch:
        """Return a batch of the samples at these positions, in that order, with all columns. Those of one run of samples are views."""
        picked = torch.as_tensor(samples, dtype=torch.int64, device=self.tokens.device)
        lengths = self.lengths.index_select(0, picked)
        runs: list[list[int]] = []
        for start, n in zip(self.starts.index_select(0, picked).tolist(), lengths.tolist(), strict=True):
            if runs and runs[-1][1] == start:
                runs[-1][1] += n
            else:
                runs.append([start, start + n])

        # slices, since selecting rows by index takes several times as long, and advanced indexing starts all of torch's threads
        def rows(column: Any) -> Any:
            if isinstance(column, Ragged):
                return column.select(torch.cat([_EMPTY, *(torch.arange(*run) for run in runs)]).to(picked.device))
            parts = [column[start:end] for start, end in runs]
            return parts[0] if len(parts) == 1 else torch.cat([column[:0], *parts])

        return Batch(
            tokens=rows(self.tokens),
            lengths=lengths,
            prompt_lengths=self.prompt_lengths.index_select(0, picked),
            group=self.group.index_select(0, picked),
            rollout=self.rollout.index_select(0, picked),
            index=self.index.index_select(0, picked),
            columns={k: rows(v) for k, v in self.columns.items()},
            scalars={k: v.index_select(0, picked) for k, v in self.scalars.items()},
            media=tuple(self.media[i] for i in picked.tolist()) if self.media else (),
            inputs=self.inputs,
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy on another device."""
        moved: dict[str, Any] = {
            k: to_device(getattr(self, k), device)
            for k in ("tokens", "lengths", "prompt_lengths", "group", "rollout", "index")
        }
        columns = {k: v.to(device) if isinstance(v, Ragged) else to_device(v, device) for k, v in self.columns.items()}
        return replace(
            self, **moved, columns=columns, scalars={k: to_device(v, device) for k, v in self.scalars.items()}
        )

    def find_fault(self, vocabulary: int) -> str:
        """Describe the first invalid value; "" if every column has one valid row per token and every scalar one per sample."""
        tokens, own = len(self.tokens), self.tokens
        if not isinstance(own, Tensor) or own.dtype != torch.int64:
            return f"batch.tokens is {describe(own)}; expected a Tensor of int64 token ids"
        low, high = (int(bound) for bound in own.aminmax()) if tokens else (0, 0)
        if low < 0 or high >= vocabulary:
            return (
                f"batch.tokens has the token {low if low < 0 else high}; expected token ids from 0 to {vocabulary - 1}"
            )
        for name, column in (self.columns | self.scalars).items():
            if isinstance(column, Tensor) and column.device != own.device:
                return f"batch has {name!r} on {column.device}; expected {own.device}, the device of batch.tokens"
            if isinstance(column, Tensor) and column.is_floating_point() and not bool(column.isfinite().all()):
                return f"batch has {name!r} with {float(column[~column.isfinite()][0])}; expected finite values"
        for name, column in self.columns.items():
            if not isinstance(column, (Tensor, Ragged)):
                return f"batch.columns[{name!r}] is {describe(column)}; expected a Tensor [tokens, ...]"
            if (rows := len(column.offsets) - 1 if isinstance(column, Ragged) else _count_rows(column)) != tokens:
                return f"batch.columns[{name!r}] has {rows} rows; expected {tokens}, one per token"
        for name, scalar in self.scalars.items():
            if not isinstance(scalar, Tensor) or _count_rows(scalar) != len(self):
                return f"batch.scalars[{name!r}] is {describe(scalar)}; expected a Tensor of {len(self)} rows, one per sample"
        if (total := int(self.lengths.sum())) != tokens:
            return f"batch.lengths add up to {total}; expected {tokens}, the number of tokens"
        return ""


def _count_rows(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() else 0


def find_column_fault(name: str, value: Any, like: Tensor) -> str:
    """Describe a value that is not a floating-point tensor of the shape [tokens] and device of ``like``; "" if it is."""
    if not isinstance(value, Tensor) or value.shape != like.shape or not value.is_floating_point():
        return f"{name} is {describe(value)}; expected a float Tensor [tokens] = {list(like.shape)}"
    return "" if value.device == like.device else f"{name} is on {value.device}; the batch is on {like.device}"


def find_value_fault(name: str, value: Tensor, least: float = -math.inf) -> str:
    """Describe the first value [tokens] that is not finite or less than ``least``; "" if there is none."""
    wrong = ~(torch.isfinite(value) & (value >= least))
    if not bool(wrong.any()):
        return ""
    at, expected = int(wrong.nonzero()[0]), "finite" if least == -math.inf else f"finite and at least {least}"
    return (
        f"{name}[{at}] is {float(value[at])} ({int(wrong.sum())} of {len(value)} tokens are wrong); expected {expected}"
    )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; from a CPU to a GPU through pinned memory, so that the host does not wait for the GPU."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=tensor.is_pinned())


def collate(samples: Sequence[Sample], declared: Iterable[Field] = ()) -> Batch:
    """Make a batch of ``samples`` with core's fields and the plugins' fields ``declared``.

    A declared field yields a column if at least one sample recorded it; the rows of samples without it are padded.
    """
    read = [*zip(*map(_READ, samples), strict=True)] or [()] * 9
    tokens, responses, group, index, rollout, media, fields, masks, removed = read
    siblings = [n if own is None else own for n, own in zip(index, rollout, strict=True)]
    lengths = np.array([*map(len, tokens)], np.int64)
    prompts = lengths - np.array(responses, np.int64)
    starts, total = lengths.cumsum() - lengths, int(lengths.sum())
    batch = Batch(
        tokens=torch.from_numpy(concatenate(tokens, "int64")),
        lengths=torch.from_numpy(lengths),
        prompt_lengths=torch.from_numpy(prompts),
        group=torch.from_numpy(np.array(group, np.int64)),
        rollout=torch.from_numpy(np.array(siblings, np.int64)),
        index=torch.from_numpy(np.array(index, np.int64)),
        media=media if any(media) else (),
    )
    recorded = set(_OWN).union(*filter(None, fields))
    if not any(removed) and all(mask is None for mask in masks):
        batch.columns["loss_mask"] = torch.from_numpy(_fill(starts + prompts, lengths - prompts, total))
        recorded.remove("loss_mask")
    for spec in (spec for spec in (*CORE_FIELDS, *declared) if spec.name in recorded):
        own = _OWN.get(spec.name)
        values = [getattr(s, own) if own else s.fields.get(spec.name) for s in samples]
        if all(v is None for v in values):
            continue
        if spec.align == "sample":
            padded = [spec.pad if v is None else v for v in values]
            batch.scalars[spec.name] = torch.as_tensor(np.asarray(padded, spec.dtype))
        else:
            first = starts + prompts if spec.align == "response" else starts
            batch.columns[spec.name] = (_ragged_column if spec.ragged else _column)(spec, first, values, total)
        if spec.align in ("token", "token-1"):
            batch.inputs |= {spec.name}
    return batch


def _column(spec: Field, first: np.ndarray, values: Sequence[Any], total: int) -> Tensor:
    """Return the column [total, ...] of a field; ``first`` is the row at which each sample's values begin."""
    first, known = first[[value is not None for value in values]], [value for value in values if value is not None]
    out = np.full((total, *np.shape(known[0])[1:]), spec.pad, spec.dtype)
    for at, value in zip(first.tolist(), known, strict=True):
        out[at : at + len(value)] = value if type(value) is Column else np.asarray(value, spec.dtype)
    return torch.from_numpy(out)


def _fill(first: np.ndarray, counts: np.ndarray, total: int) -> np.ndarray:
    """Return ``total`` rows, float32: 1 in runs of ``counts`` rows that begin at ``first``, in order, and 0 in the others."""
    borders = np.stack([first, first + counts], axis=1).ravel()
    runs = np.diff(borders, prepend=0, append=total)  # alternating parts outside and inside of them
    return np.repeat((np.arange(len(runs)) % 2).astype(np.float32), runs)


def _ragged_column(spec: Field, first: np.ndarray, values: Sequence[Any], total: int) -> Ragged:
    counts = np.zeros(total, np.int64)
    rows: list[Any] = []
    for start, value in zip(first, values, strict=True):
        own = [] if value is None else list(value)
        counts[start : start + len(own)] = [len(row) for row in own]
        rows += own
    offsets = np.concatenate([[0], counts.cumsum()])
    return Ragged(torch.from_numpy(concatenate(rows, spec.dtype)), torch.from_numpy(offsets))


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum ``values [tokens]`` over each sample: [samples], float64; an empty sample gives 0. Differentiable."""
    if len(lengths) == 0:  # segment_reduce does not support this case
        return values.double()[:0]
    return torch.segment_reduce(values.double(), "sum", lengths=lengths, initial=0.0)


def expand(values: Tensor, lengths: Tensor) -> Tensor:
    """Repeat ``values [samples]`` on every token of its sample: [tokens]. For numbers on a CPU, numpy takes a tenth of torch's time."""
    if values.is_cpu and not values.requires_grad and values.dtype != torch.bfloat16:
        return torch.from_numpy(np.repeat(values.numpy(), lengths.numpy()))
    return torch.repeat_interleave(values, lengths)


def mask_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    """Count the unmasked tokens of each sample: [samples], int64."""
    return segment_sum(mask.bool().double(), lengths).round().long()


class Unmasked:
    """Converts between flat columns and matrices [samples, longest] of each sample's unmasked tokens.

    Recursions over time thus treat unmasked tokens as adjacent, without steps for masked tokens (tool text between two turns).
    """

    def __init__(self, mask: Tensor, lengths: Tensor) -> None:
        self.mask = mask.bool()
        self.counts = mask_counts(mask, lengths)
        samples = torch.arange(len(lengths), device=mask.device)
        self.row = expand(samples, lengths)[self.mask]
        start = torch.cumsum(self.counts, 0) - self.counts
        self.column = torch.arange(len(self.row), device=mask.device) - start[self.row]
        self.width = int(self.counts.max()) if len(lengths) else 0

    def pack(self, values: Tensor) -> Tensor:
        """Convert [tokens] to [samples, longest], padded with 0."""
        matrix = values.new_zeros(len(self.counts), self.width)
        matrix[self.row, self.column] = values[self.mask]
        return matrix

    def unpack(self, matrix: Tensor) -> Tensor:
        """Convert [samples, longest] to [tokens], with 0 for masked tokens."""
        values = matrix.new_zeros(len(self.mask))
        values[self.mask] = matrix[self.row, self.column]
        return values


def is_scalar(value: Any) -> bool:
    """Whether a value is a number or a 0-d tensor."""
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, Real)


def is_pair(value: Any) -> bool:
    """Whether a value is a (sum, weight) pair of two numbers or 0-d tensors."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_scalar, value))


def find_metric_fault(metrics: Mapping[Any, Any], is_valid: Callable[[Any], bool], expected: str, prefix: bool) -> str:
    """Describe the first metric whose value is not valid or, with ``prefix``, whose name has no prefix; "" if there is none."""
    for name, value in metrics.items():
        if not is_valid(value):
            return f"the metric {name!r} is {describe(value)}; expected {expected}"
        if prefix and (not isinstance(name, str) or "/" not in name):
            return f"the metric {name!r} has no prefix; name it <plugin>/{name}"
    return ""


def find_pair_fault(pairs: Any) -> str:
    """Describe metrics that are not a dict of name -> (sum, weight) with a prefix in every name; "" if they are."""
    if not isinstance(pairs, dict):
        return f"its metrics are {describe(pairs)}; expected a dict of name -> (sum, weight)"
    return find_metric_fault(pairs, is_pair, "(sum, weight), two numbers or 0-d tensors", prefix=True)


def add(into: dict[str, tuple[Any, Any]], more: Mapping[str, tuple[Any, Any]]) -> None:
    """Add the pairs of ``more`` to those of ``into`` by name; sums and weights are floats or one-element tensors. Of metrics whose name
    ends in ``_max``, the larger value is kept instead of the sum."""
    for name, (total, weight) in more.items():
        if name in into:
            old, before = into[name]
            total, weight = _larger(old, total) if name.endswith("_max") else old + total, before + weight
        into[name] = total, weight


def _larger(old: Any, new: Any) -> Any:
    return new.clamp(min=old) if isinstance(new, Tensor) else max(old, new)


def as_floats(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[float, float]]:
    """Convert (sum, weight) tensors to Python floats. Synchronises with their device, once if they have only one."""
    flat = [torch.as_tensor(value, dtype=torch.float64).reshape(()) for pair in pairs.values() for value in pair]
    numbers = torch.stack(flat).tolist() if len({each.device for each in flat}) == 1 else [float(each) for each in flat]
    return dict(zip(pairs, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


def means(pairs: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return name -> sum / weight, or the maximum of a name in ``_max``; without entries of weight 0 (not measured)."""
    return {n: total if n.endswith("_max") else total / weight for n, (total, weight) in pairs.items() if weight}
