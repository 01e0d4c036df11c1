"""The checks of the values that plugins return to core, one entry per hook (``BOUNDARIES``).

The types themselves find invalid values (``find_fault``). Every call checks types and shapes, which takes microseconds and never
synchronises with a GPU. Values (finite, not negative) are checked for hooks that run once per step, and otherwise only on a CPU.
Every new hook needs an entry in ``BOUNDARIES``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from miles_core.algorithm.correction import Correction
from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Run, check_policies
from miles_core.contracts.runtime import Learned, Runtime
from miles_core.contracts.schedule import Schedule
from miles_core.contracts.trainer import Loss, Output, Trainer
from miles_core.contracts.transport import Transport
from miles_core.data.batch import find_column_fault, find_metric_fault, find_value_fault, is_scalar
from miles_core.data.field import Field
from miles_core.data.prompt_source import PromptSource
from miles_core.data.sample import find_reward_fault
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import describe
from miles_core.plugin.boundary import UNCHECKED, Boundary, Check
from miles_core.precision.codec import Codec


def _returns(is_valid: Callable[[Any], bool], expected: str, find_fault: Check | None = None) -> Check:
    """Return a check that a value is valid and, if given, that ``find_fault`` finds none in it."""

    def check(value: Any, arguments: tuple[Any, ...]) -> str:
        if not is_valid(value):
            return f"it returned {describe(value)}; expected {expected}"
        return find_fault(value, arguments) if find_fault is not None else ""

    return check


def _instance(kind: type, expected: str = "", find_fault: Check | None = None) -> Check:
    expected = expected or f"a {kind.__module__}.{kind.__name__}"
    return _returns(lambda value: isinstance(value, kind), expected, find_fault)


def _is_check(part: Any) -> bool:
    return part is None or callable(part)


def _is_sink(part: Any) -> bool:
    return part is None or all(callable(getattr(part, name, None)) for name in ("write", "close"))


def _find_unit_fault(unit: Any, _: tuple[Any, ...]) -> str:
    return (
        unit.find_fault()
        if isinstance(unit, WeightUnit)
        else f"the stream holds {describe(unit)}; expected WeightUnit(tensors)"
    )


def _find_reward_fault(reward: Any, arguments: tuple[Any, ...]) -> str:
    """Check a reward or, if the function was called with a list of samples, a list of rewards."""
    if len(arguments) < 2 or not isinstance(arguments[1], list):
        return find_reward_fault(reward)
    rewards, count = reward.tolist() if hasattr(reward, "tolist") else reward, len(arguments[1])
    if not isinstance(rewards, Sequence) or isinstance(rewards, str) or len(rewards) != count:
        return f"it returned {describe(reward)}; expected a list of {count} rewards, one per sample of the group"
    return next(filter(None, map(find_reward_fault, rewards)), "")


def _find_advantage_fault(advantages: Any, arguments: tuple[Any, ...]) -> str:
    if fault := find_column_fault("the advantage", advantages, arguments[0].mask):
        return fault
    if advantages.requires_grad:
        return "the advantage has a gradient; detach it"
    return find_value_fault("the advantage", advantages)


def _find_number_fault(metrics: Mapping[str, Any], _: tuple[Any, ...]) -> str:
    return find_metric_fault(metrics, is_scalar, "a number", prefix=False)


def _find_policy_fault(_: None, arguments: Mapping[str, Any]) -> str:
    run: Run = arguments["run"]
    check_policies(run.policies, run.generates)
    return ""


def _record_model(arguments: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Return whether any parameter is trainable, and the number of tokens that the output layer scores."""
    model = arguments["model"]
    return any(p.requires_grad for p in model.parameters()), _output_size(model)


def _find_model_fault(state: tuple[bool, int | None], arguments: Mapping[str, Any]) -> str:
    """Check that a parameter is still trainable, and that the output layer still scores the vocabulary."""
    model, (trainable, tokens) = arguments["model"], state
    trains = arguments["role"] in ("train", "shared") and trainable
    if trains and not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        return f"requires_grad is False for all {count} parameters of the model to train; leave some to train"
    if tokens is not None and (size := _output_size(model)) != tokens:
        return f"the output layer (lm_head) scores {size} tokens; expected {tokens}, the model's vocabulary"
    return ""


def _output_size(model: nn.Module) -> int | None:
    find = getattr(model, "get_output_embeddings", None)
    weight = getattr(find() if find is not None else None, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _vocabulary(run: Run) -> int:
    return int(run.plan.fact("model.vocab_size") or sys.maxsize)


def _find_request_fault(_: None, arguments: Mapping[str, Any]) -> str:
    run = arguments["run"]
    fault = arguments["request"].find_fault(_vocabulary(run), {spec.name for spec in run.fields})
    return f"it left the request with {fault}" if fault else ""


def _find_sample_fault(before: dict[str, Any], arguments: Mapping[str, Any]) -> str:
    """Check that the sample's lists have the length of its response, and that changed fields match their declarations."""
    sample, fields = arguments["sample"], {spec.name: spec for spec in arguments["run"].fields}
    sample.validate(arguments["run"].fields)
    for name, value in sample.fields.items():
        if before.get(name) is not value and (wrong := _find_field_fault(fields.get(name), value)):
            return f"sample.fields[{name!r}] is {describe(value)}; {wrong}"
    return str(sample.find_reward_fault())


def _find_field_fault(spec: Field | None, value: Any) -> str:
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


def _find_added_fault(before: dict[str, Any], arguments: Mapping[str, Any]) -> str:
    """Check that added or changed metrics are numbers and their names have a prefix."""
    added = {n: value for n, value in arguments["metrics"].items() if n not in before or before[n] is not value}
    return find_metric_fault(added, is_scalar, "a number", prefix=True)


_LEARNED = "what learn returned, or Learned({}, 0) if nothing was trained"
_NUMBERS = _instance(dict, "a dict of metrics, name -> number", _find_number_fault)
_METRICS = Boundary(before=lambda arguments: dict(arguments["metrics"]), after=_find_added_fault)

#: hook -> checks of its results. ``UNCHECKED`` hooks cannot damage their arguments, or core checks their results elsewhere.
BOUNDARIES: dict[str, Boundary] = {
    "on_start": Boundary(after=_find_policy_fault),
    "on_model": Boundary(before=_record_model, after=_find_model_fault),
    "on_mtp_layers": UNCHECKED,  # the trainer checks the requests against its model
    "on_request": Boundary(after=_find_request_fault),
    "on_sample": Boundary(before=lambda arguments: dict(arguments["sample"].fields), after=_find_sample_fault),
    "on_evaluation": _METRICS,
    "wrap_learn": Boundary(call=_instance(Learned, _LEARNED, lambda it, _: _NUMBERS(it.metrics, ())), kind="async"),
    "wrap_export": Boundary(call=_returns(lambda value: value is None, "nothing")),
    "on_batch": Boundary(after=lambda _, given: given["batch"].find_fault(_vocabulary(given["run"]))),
    "wrap_forward": Boundary(call=_instance(Output, "an Output", lambda it, given: it.find_fault(*given[1:]))),
    "wrap_correction": Boundary(
        call=_instance(Correction, "a Correction", lambda it, given: it.find_fault(given[0].mask))
    ),
    "wrap_loss": Boundary(call=_instance(Loss, "a Loss", lambda it, _: it.find_fault())),
    "wrap_weights": Boundary(call=_find_unit_fault, kind="stream", shapes=WeightUnit.describe_shapes),
    "wrap_optimizer_step": Boundary(call=_NUMBERS),
    "on_step": _METRICS,
    "on_save": UNCHECKED,  # Store.put checks its arguments
    "on_load": UNCHECKED,
    "on_stop": UNCHECKED,
    "make_runtime": Boundary(part=_instance(Runtime)),
    "make_model": Boundary(part=_instance(nn.Module)),
    "make_trainer": Boundary(part=_instance(Trainer)),
    "make_engine": Boundary(part=_instance(Engine)),
    "make_decoder": Boundary(part=_returns(lambda part: part is not None, "the part: is a `return` missing?")),
    "make_schedule": Boundary(part=_instance(Schedule)),
    "make_transport": Boundary(part=_instance(Transport)),
    "make_advantage": Boundary(part=_returns(callable, "a function"), call=_find_advantage_fault),
    "make_reward": Boundary(part=_returns(callable, "a function"), call=_find_reward_fault, kind="async"),
    "make_sink": Boundary(part=_returns(_is_sink, "an object with write(step, metrics) and close(), or None")),
    "make_media": Boundary(part=_returns(callable, "a function")),
    "make_prompts": Boundary(part=_instance(PromptSource)),
    "make_codec": Boundary(part=_instance(Codec)),
    "make_inline_rollouts": Boundary(part=_instance(Runtime)),
    "make_check": Boundary(part=_returns(_is_check, "a function"), call=_NUMBERS, kind="async"),
    # Core checks the results of the following hooks where it uses them.
    "make_generate": UNCHECKED,
    "make_sent_weights": UNCHECKED,
    "make_head": UNCHECKED,
    "make_optimizer": UNCHECKED,
}
