"""Checks of what event hooks (``on_*``) leave in their arguments; ``miles_core.contracts.returned`` assigns them to hooks.

``before`` functions record a state ahead of the hook, ``after`` functions return an error message, or "" for valid arguments; they may
also raise a MilesError.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.contracts.engine import Request, Sampling
from miles_core.contracts.exchanged import describe_invalid_tokens, vocabulary_size
from miles_core.contracts.run import check_policies
from miles_core.data.batch import Batch, Ragged
from miles_core.data.column import TOKENS, Column, as_column
from miles_core.data.field import Field
from miles_core.data.sample import Sample, number
from miles_core.errors import DataError
from miles_core.plugin.guard import describe


def describe_mismatch(value: Any, expected: str) -> str:
    """Return the error message for a value of the wrong type or shape."""
    return f"it returned {describe(value)}; expected {expected}"


def is_scalar(value: Any) -> bool:
    """Whether a value is a number or a 0-d tensor."""
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, Real)


def check_one_reward(value: Any) -> str:
    """Check for a finite number or a dict of them."""
    entries = value if isinstance(value, Mapping) else {"": value}
    if not entries:
        return describe_mismatch(value, "a number, or a dict of numbers")
    for name, entry in entries.items():
        try:
            number(entry, None)
        except DataError as error:
            return f"the reward{f' {name!r}' if name else ''} {error}"
    return ""


def check_reward_of(sample: Sample) -> str:
    """Check the reward of a sample, if it has one; a dict is not looked into."""
    if sample.reward is None or isinstance(sample.reward, Mapping):  # a dict may hold entries that are no reward
        return ""
    return f"sample {sample.index}: {wrong}" if (wrong := check_one_reward(sample.reward)) else ""


def check_policies_of(_: None, arguments: Mapping[str, Any]) -> str:
    """Check ``run.policies``; raises PluginError."""
    check_policies(arguments["run"].policies)
    return ""


def record_model(arguments: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Return whether any parameter is trainable, and the number of tokens that the output layer scores."""
    model = arguments["model"]
    return any(p.requires_grad for p in model.parameters()), _output_size(model)


def check_model(state: tuple[bool, int | None], arguments: Mapping[str, Any]) -> str:
    """Check that a parameter is still trainable, and that the output layer still scores the vocabulary."""
    model, role = arguments["model"], arguments["role"]
    trainable, tokens = state
    if role in ("train", "shared") and trainable and not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        return f"requires_grad is False for all {count} parameters of the model to train; leave some to train"
    size = _output_size(model)
    if tokens is not None and size != tokens:
        return f"the output layer (lm_head) scores {size} tokens; expected {tokens}, the model's vocabulary"
    return ""


def _output_size(model: nn.Module) -> int | None:
    find = getattr(model, "get_output_embeddings", None)
    layer = find() if find is not None else None
    weight = getattr(layer, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def check_batch(_: None, arguments: Mapping[str, Any]) -> str:
    """Check that every column has one row per token and every scalar one row per sample."""
    batch: Batch = arguments["batch"]
    tokens, count = len(batch.tokens), len(batch)
    if not isinstance(batch.tokens, Tensor) or batch.tokens.dtype != torch.int64:
        return f"batch.tokens is {describe(batch.tokens)}; expected a Tensor of int64 token ids"
    low, high = (int(bound) for bound in batch.tokens.aminmax()) if tokens else (0, 0)
    if low < 0 or high >= (vocabulary := vocabulary_size(arguments["run"])):
        return f"batch.tokens has the token {low if low < 0 else high}; expected token ids from 0 to {vocabulary - 1}"
    for name, column in (batch.columns | batch.scalars).items():
        if isinstance(column, Tensor) and column.device != batch.tokens.device:
            return f"batch has {name!r} on {column.device}; expected {batch.tokens.device}, the device of batch.tokens"
        if isinstance(column, Tensor) and column.is_floating_point() and not bool(column.isfinite().all()):
            return f"batch has {name!r} with {float(column[~column.isfinite()][0])}; expected finite values"
    for name, column in batch.columns.items():
        if not isinstance(column, (Tensor, Ragged)):
            return f"batch.columns[{name!r}] is {describe(column)}; expected a Tensor [tokens, ...]"
        if (rows := len(column.offsets) - 1 if isinstance(column, Ragged) else _count_rows(column)) != tokens:
            return f"batch.columns[{name!r}] has {rows} rows; expected {tokens}, one per token"
    for name, scalar in batch.scalars.items():
        if not isinstance(scalar, Tensor) or _count_rows(scalar) != count:
            return f"batch.scalars[{name!r}] is {describe(scalar)}; expected a Tensor of {count} rows, one per sample"
    if int(batch.lengths.sum()) != tokens:
        return f"batch.lengths add up to {int(batch.lengths.sum())}; expected {tokens}, the number of tokens"
    return ""


def _count_rows(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() else 0


def copy_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the sample's fields before the hook changes them."""
    return dict(arguments["sample"].fields)


def check_sample(state: dict[str, Any], arguments: Mapping[str, Any]) -> str:
    """Check that the sample's lists have the length of its response, and that added fields match their declarations."""
    sample, fields = arguments["sample"], {spec.name: spec for spec in arguments["run"].fields}
    sample.validate(arguments["run"].fields)
    for name, value in sample.fields.items():
        if state.get(name) is not value and (wrong := _check_field(fields.get(name), value)):
            return f"sample.fields[{name!r}] is {describe(value)}; {wrong}"
    return check_reward_of(sample)


def _check_field(spec: Field | None, value: Any) -> str:
    if spec is None:
        return "no manifest declares this field; add miles_core.data.Field(...) to `fields` of the plugin"
    if spec.ragged or not isinstance(value, (list, tuple, np.ndarray, Tensor)):  # others may be stored elsewhere
        return ""
    try:
        rows = np.asarray(value)
    except (TypeError, ValueError):
        rows = np.asarray("")
    if rows.dtype.kind not in "biuf":
        return f"expected rows of {spec.dtype}, as declared"
    shape = rows.shape[spec.align != "sample" :]
    valid = len(shape) == len(spec.shape) and all(w in (None, n) for w, n in zip(spec.shape, shape, strict=True))
    return "" if valid else f"expected {spec.dtype} rows of shape {list(spec.shape)}, as declared"


def check_request(_: None, arguments: Mapping[str, Any]) -> str:
    """Check that the request still has a prompt, and a set of field names to record."""
    request: Request = arguments["request"]
    if not request.tokens or not isinstance(request.tokens, (list, Column)):
        return f"it left the request with tokens that are {describe(request.tokens)}; expected a list of token ids"
    request.tokens = as_column(request.tokens, TOKENS)  # a plugin may have set a list
    if wrong := describe_invalid_tokens(request.tokens, vocabulary_size(arguments["run"])):
        return f"it left the request with {wrong}"
    if not isinstance(request.sampling, Sampling) or request.sampling.max_new_tokens < 1:
        return f"it left the request with sampling {request.sampling!r:.80}; expected a Sampling with max_new_tokens of at least 1"
    declared = {spec.name for spec in arguments["run"].fields}
    if not isinstance(request.extras, set) or request.extras - declared:
        return f"it left the request with extras {request.extras!r:.80}; expected a set with some of {', '.join(sorted(declared))}"
    return ""


def copy_metrics(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the metrics before the hook changes them."""
    return dict(arguments["metrics"])


def check_added_metrics(state: dict[str, Any], arguments: Mapping[str, Any]) -> str:
    """Check that added or changed metrics are numbers and their names have a prefix."""
    for name, value in arguments["metrics"].items():
        if name in state and state[name] is value:
            continue
        if not is_scalar(value):
            return f"the metric {name!r} is {describe(value)}; expected a number"
        if not isinstance(name, str) or "/" not in name:
            return f"the metric {name!r} has no prefix; name it <plugin>/{name}"
    return ""
