"""Checks of the values that plugins return to core, one entry per hook (``BOUNDARIES``).

A check returns an error message, or "" for a valid value. Every call checks types and shapes, which takes microseconds and never
synchronises with a GPU. Values (finite, not negative) are checked for hooks that run once per step, and otherwise only on a CPU.
Every new hook needs an entry in ``BOUNDARIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.algorithm.correction import Correction
from miles_core.contracts import changed
from miles_core.contracts.changed import check_one_reward, check_reward_of, describe_mismatch, is_scalar
from miles_core.contracts.engine import Engine
from miles_core.contracts.runtime import Learned, Runtime
from miles_core.contracts.schedule import Schedule
from miles_core.contracts.trainer import Loss, Output, Trainer
from miles_core.contracts.transport import Transport
from miles_core.data.prompt_source import PromptSource
from miles_core.data.sample import Sample
from miles_core.data.unit import Unit
from miles_core.plugin.guard import UNCHECKED, Boundary, describe
from miles_core.precision.codec import Codec

# -- parts ------------------------------------------------------------------------------------------------------------


def check_instance(kind: type) -> Callable[[Any], str]:
    """Return a check that a part is an instance of ``kind``."""
    return lambda part: (
        "" if isinstance(part, kind) else describe_mismatch(part, f"a {kind.__module__}.{kind.__name__}")
    )


def check_callable(part: Any) -> str:
    """Check that a part is callable."""
    return "" if callable(part) else describe_mismatch(part, "a function")


def check_function_or_none(part: Any) -> str:
    """Check that a part is callable, or None for no part."""
    return "" if part is None else check_callable(part)


def check_present(part: Any) -> str:
    """Check that a part is not None; another part defines its interface."""
    return "" if part is not None else describe_mismatch(part, "the part: is a `return` missing?")


def check_sink(part: Any) -> str:
    """Check for an object with ``write`` and ``close``, or None."""
    if part is None or (callable(getattr(part, "write", None)) and callable(getattr(part, "close", None))):
        return ""
    return describe_mismatch(part, "an object with write(step, metrics) and close(), or None")


# -- rollout ----------------------------------------------------------------------------------------------------------


def check_groups(value: Any, _: tuple[Any, ...]) -> str:
    """Check for a list of groups, each a list of samples."""
    expected = "a list of groups, each a list of Sample"
    if not isinstance(value, list) or not value:
        return describe_mismatch(value, expected)
    for group in value:
        if _check_sample_list(group):
            return describe_mismatch(group, f"{expected}; this is one of its entries")
        if wrong := next(
            (w for s in group if (w := check_reward_of(s) or f"sample {s.index} has no reward" * (s.reward is None))),
            "",
        ):
            return wrong
    return ""


def check_samples(value: Any, _: tuple[Any, ...]) -> str:
    """Check for a list of at least one sample, whose rewards, if they have any, are numbers or dicts."""
    return _check_sample_list(value) or next((wrong for s in value if (wrong := check_reward_of(s))), "")


def _check_sample_list(value: Any) -> str:
    valid = isinstance(value, list) and value and all(isinstance(s, Sample) for s in value)
    return "" if valid else describe_mismatch(value, "a list of at least one Sample")


def check_reward(value: Any, arguments: tuple[Any, ...]) -> str:
    """Check for a finite number or a dict of numbers; for a group reward, a list of them, one per sample of ``(args, samples)``."""
    if len(arguments) < 2 or not isinstance(arguments[1], list):
        return check_one_reward(value)
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(arguments[1]):
        return describe_mismatch(value, f"a list of {len(arguments[1])} rewards, one per sample of the group")
    return next((wrong for wrong in map(check_one_reward, values) if wrong), "")


def check_learned(value: Any, _: tuple[Any, ...]) -> str:
    """Check for a ``Learned`` whose metrics are numbers."""
    if not isinstance(value, Learned):
        return describe_mismatch(value, "what learn returned, or Learned({}, 0) if nothing was trained")
    return check_numbers(value.metrics, ())


def check_nothing(value: Any, _: tuple[Any, ...]) -> str:
    """Check for None."""
    return "" if value is None else describe_mismatch(value, "nothing")


# -- training ---------------------------------------------------------------------------------------------------------


def check_metrics(pairs: Any) -> str:
    """Check for a dict of name -> (sum, weight) in which every name has a prefix."""
    if not isinstance(pairs, dict):
        return f"its metrics are {describe(pairs)}; expected a dict of name -> (sum, weight)"
    for name, pair in pairs.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and is_scalar(pair[0]) and is_scalar(pair[1])):
            return f"the metric {name!r} is {describe(pair)}; expected (sum, weight), two numbers or 0-d tensors"
        if not isinstance(name, str) or "/" not in name:
            return f"the metric {name!r} has no prefix; name it <plugin>/{name}"
    return ""


def _check_column(name: str, value: Any, like: Tensor) -> str:
    """Check for a floating-point [tokens] tensor on the device of ``like``."""
    if not isinstance(value, Tensor) or value.shape != like.shape or not value.is_floating_point():
        return f"{name} is {describe(value)}; expected a float Tensor [tokens] = {list(like.shape)}"
    if value.device != like.device:
        return f"{name} is on {value.device}; the batch is on {like.device}"
    return ""


def _check_values(name: str, value: Tensor, negative: bool) -> str:
    """Check that the values [tokens] are finite and, unless ``negative``, at least 0."""
    wrong = ~torch.isfinite(value) if negative else ~(torch.isfinite(value) & (value >= 0))
    if not bool(wrong.any()):
        return ""
    at = int(wrong.nonzero()[0])
    range_ = "finite" if negative else "finite and at least 0"
    return (
        f"{name}[{at}] is {float(value[at])} ({int(wrong.sum())} of {len(value)} tokens are wrong); expected {range_}"
    )


def check_output(value: Any, arguments: tuple[Any, ...]) -> str:
    """Check for an ``Output`` whose columns have the micro-batch's shape and device."""
    _, batch, ctx = arguments
    if not isinstance(value, Output):
        return describe_mismatch(value, "an Output")
    for name in ("log_probs", "entropy"):
        column = getattr(value, name)
        if column is not None and (wrong := _check_column(name, column, batch.tokens)):
            return wrong
    trains = ctx.kind == "train" and torch.is_grad_enabled()
    if trains and value.log_probs is not None and not value.log_probs.requires_grad:
        return "log_probs has no gradient; return what the inner function computed, without detach()"
    for name, pair in value.aux.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and is_scalar(pair[0]) and is_scalar(pair[1])):
            return f"aux[{name!r}] is {describe(pair)}; expected (sum, weight), two 0-d tensors"
    return check_metrics(ctx.metrics)


def check_correction(value: Any, arguments: tuple[Any, ...]) -> str:
    """Check for a ``Correction`` with one weight and one keep flag per token."""
    if not isinstance(value, Correction):
        return describe_mismatch(value, "a Correction")
    like = arguments[0].mask
    if wrong := _check_column("Correction.weight", value.weight, like):
        return wrong
    if not isinstance(value.keep, Tensor) or value.keep.dtype != torch.bool or value.keep.shape != like.shape:
        return f"Correction.keep is {describe(value.keep)}; expected a bool Tensor [tokens] = {list(like.shape)}"
    if value.weight.requires_grad:
        return "Correction.weight has a gradient; detach it"
    if value.weight.device.type == "cpu" and (
        wrong := _check_values("Correction.weight", value.weight, negative=False)
    ):
        return wrong
    return check_metrics(value.metrics)


def check_loss(value: Any, _: tuple[Any, ...]) -> str:
    """Check for a ``Loss`` with a 0-d value that has a gradient."""
    if not isinstance(value, Loss):
        return describe_mismatch(value, "a Loss")
    if not isinstance(value.value, Tensor) or value.value.dim():
        return f"Loss.value is {describe(value.value)}; expected a 0-d Tensor, the micro-batch's share of the loss"
    if torch.is_grad_enabled() and not value.value.requires_grad:
        return "Loss.value has no gradient; compute it from output.log_probs, without detach() or item()"
    return check_metrics(value.metrics)


def check_advantages(value: Any, arguments: tuple[Any, ...]) -> str:
    """Check for a floating-point [tokens] tensor of finite values."""
    like = arguments[0].mask
    wrong = _check_column("the advantage", value, like)
    if not wrong and value.requires_grad:
        wrong = "the advantage has a gradient; detach it"
    return wrong or _check_values("the advantage", value, negative=True)


def check_numbers(value: Any, _: tuple[Any, ...]) -> str:
    """Check for metrics: a dict of numbers."""
    if not isinstance(value, dict):
        return describe_mismatch(value, "a dict of metrics, name -> number")
    wrong = next((name for name, entry in value.items() if not is_scalar(entry)), None)
    return "" if wrong is None else f"the metric {wrong!r} is {describe(value[wrong])}; expected a number"


def check_unit(value: Any, _: tuple[Any, ...]) -> str:
    """Check for a ``Unit`` of named tensors."""
    if not isinstance(value, Unit):
        return f"the stream holds {describe(value)}; expected Unit(tensors)"
    if not isinstance(value.tensors, dict) or not value.tensors:
        return f"Unit.tensors is {describe(value.tensors)}; expected a dict of checkpoint name -> Tensor"
    for name, tensor in value.tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            return f"Unit.tensors[{name!r}] is {describe(tensor)}; expected a Tensor under its checkpoint name"
    return ""


def unit_shapes(unit: Unit) -> dict[str, str]:
    """Return checkpoint name -> kind of number and shape, as in "float [4, 8]"."""
    kinds = {True: "float", False: "integer"}
    return {name: f"{kinds[tensor.is_floating_point()]} {list(tensor.shape)}" for name, tensor in unit.tensors.items()}


#: hook -> checks of its results. ``UNCHECKED`` hooks cannot damage their arguments, or core checks their results elsewhere.
BOUNDARIES: dict[str, Boundary] = {
    "on_start": Boundary(after=changed.check_policies_of),
    "on_model": Boundary(before=changed.record_model, after=changed.check_model),
    "on_mtp_layers": UNCHECKED,  # the trainer checks the requests against its model
    "wrap_rollout": Boundary(call=check_groups, kind="async"),
    "wrap_generate": Boundary(call=check_samples, kind="async"),
    "on_request": Boundary(after=changed.check_request),
    "on_sample": Boundary(before=changed.copy_fields, after=changed.check_sample),
    "on_evaluation": Boundary(before=changed.copy_metrics, after=changed.check_added_metrics),
    "wrap_learn": Boundary(call=check_learned, kind="async"),
    "wrap_export": Boundary(call=check_nothing),
    "on_batch": Boundary(after=changed.check_batch),
    "wrap_forward": Boundary(call=check_output),
    "wrap_correction": Boundary(call=check_correction),
    "wrap_loss": Boundary(call=check_loss),
    "wrap_weights": Boundary(call=check_unit, kind="stream", shapes=unit_shapes),
    "wrap_optimizer_step": Boundary(call=check_numbers),
    "on_weights_synced": UNCHECKED,
    "on_step": Boundary(before=changed.copy_metrics, after=changed.check_added_metrics),
    "on_save": UNCHECKED,  # Store.put checks its arguments
    "on_load": UNCHECKED,
    "on_stop": UNCHECKED,
    "make_runtime": Boundary(part=check_instance(Runtime)),
    "make_model": Boundary(part=check_instance(nn.Module)),
    "make_trainer": Boundary(part=check_instance(Trainer)),
    "make_engine": Boundary(part=check_instance(Engine)),
    "make_decoder": Boundary(part=check_present),
    "make_schedule": Boundary(part=check_instance(Schedule)),
    "make_transport": Boundary(part=check_instance(Transport)),
    "make_advantage": Boundary(part=check_callable, call=check_advantages),
    "make_reward": Boundary(part=check_callable, call=check_reward, kind="async"),
    "make_sink": Boundary(part=check_sink),
    "make_prompts": Boundary(part=check_instance(PromptSource)),
    "make_codec": Boundary(part=check_instance(Codec)),
    "make_check": Boundary(part=check_function_or_none, call=check_numbers, kind="async"),
    # Core checks the results of the following hooks where it uses them.
    "make_generate": UNCHECKED,
    "make_head": UNCHECKED,
    "make_optimizer": UNCHECKED,
}
