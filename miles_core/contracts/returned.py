"""What plugins may hand to core: for every hook, how its results are checked where they arrive.

A check returns what is wrong, or "". Types and shapes are compared at every call, which costs microseconds and never waits for a GPU;
values (finite, not negative) are read where a hook runs once per step, and otherwise only on a CPU. A hook that is added needs
an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from miles_core.algorithm.correction import Correction
from miles_core.contracts.engine import Engine, Request, Response
from miles_core.contracts.runtime import Runtime
from miles_core.contracts.schedule import Schedule
from miles_core.contracts.trainer import Loss, Output, Trainer
from miles_core.contracts.transport import Transport
from miles_core.data.batch import Batch, Ragged
from miles_core.data.reward_value import number
from miles_core.data.sample import Sample
from miles_core.data.unit import Unit
from miles_core.errors import DataError
from miles_core.plugin.guard import UNCHECKED, Boundary, describe, refuse

if TYPE_CHECKING:
    from miles_core.contracts.run import Run


def expected(value: Any, what: str) -> str:
    """The words for a value of another type or shape."""
    return f"it returned {describe(value)}; expected {what}"


# -- parts ------------------------------------------------------------------------------------------------------------


def instance_of(kind: type) -> Callable[[Any], str]:
    """A check that a part is a ``kind``."""
    return lambda made: "" if isinstance(made, kind) else expected(made, f"a {kind.__module__}.{kind.__name__}")


def function(made: Any) -> str:
    """A part that core calls."""
    return "" if callable(made) else expected(made, "a function")


def present(made: Any) -> str:
    """A part whose interface another part defines."""
    return "" if made is not None else expected(made, "the part: is a `return` missing?")


# -- rollout ----------------------------------------------------------------------------------------------------------


def groups(value: Any, _: tuple[Any, ...]) -> str:
    """A list of groups, each a list of samples."""
    what = "a list of groups, each a list of Sample"
    if not isinstance(value, list):
        return expected(value, what)
    return next((expected(g, f"{what}; this is one of its entries") for g in value if _samples(g)), "")


def samples(value: Any, _: tuple[Any, ...]) -> str:
    """A list of at least one sample."""
    return _samples(value)


def _samples(value: Any) -> str:
    right = isinstance(value, list) and value and all(isinstance(s, Sample) for s in value)
    return "" if right else expected(value, "a list of at least one Sample")


def reward(value: Any, arguments: tuple[Any, ...]) -> str:
    """A finite number or a dict of numbers; of a group reward, a list of them, one per sample of ``(args, samples)``."""
    if len(arguments) < 2 or not isinstance(arguments[1], list):
        return _one_reward(value)
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(arguments[1]):
        return expected(value, f"a list of {len(arguments[1])} rewards, one per sample of the group")
    return next((wrong for wrong in map(_one_reward, values) if wrong), "")


def _one_reward(value: Any) -> str:
    entries = value if isinstance(value, Mapping) else {"": value}
    if not entries:
        return expected(value, "a number, or a dict of numbers")
    for name, entry in entries.items():
        try:
            number(entry, None)
        except DataError as error:
            return f"the reward{f' {name!r}' if name else ''} {error}"
    return ""


def check_response(run: Run, request: Request, found: Any) -> None:
    """Check an engine's answer to ``request``.

    Raises:
        PluginError: it is no response to that request; names the plugin that provides the engine.
    """
    if wrong := _response(request, found):
        name = run.config.run.engine
        raise refuse(run.hooks.provider("engine", name), f"make_engine ({name})", wrong)


def _response(request: Request, found: Any) -> str:
    if not isinstance(found, Response):
        return expected(found, "a Response from Engine.generate")
    count, most = len(found.tokens), request.sampling.max_new_tokens
    if count > most:
        return f"the response has {count} tokens; the request allows max_new_tokens {most}"
    if len(found.log_probs) != count:
        return f"the response has {count} tokens and {len(found.log_probs)} log_probs; expected one per token"
    if found.finish not in ("stop", "length", "abort"):
        return f"the response has finish {found.finish!r}; expected stop, length or abort"
    if not count and found.finish != "abort":
        return f"the response has no tokens and finish {found.finish!r}; a finished response has at least one"
    return _versions(found.weight_versions, count)


def _versions(pairs: list[tuple[int, int]], count: int) -> str:
    starts, versions = [start for start, _ in pairs], [version for _, version in pairs]
    if versions != sorted(versions) or len(set(starts)) < len(starts) or starts != sorted(starts):
        return f"the response has weight_versions {pairs}; expected (first token, version) with both in ascending order"
    if pairs and (starts[0] != 0 or starts[-1] > count):
        return f"the response has weight_versions {pairs} for {count} tokens; expected the first to begin at token 0"
    return ""


# -- training ---------------------------------------------------------------------------------------------------------


def metrics(pairs: Any) -> str:
    """A dict of name -> (sum, weight), whose names have a prefix."""
    if not isinstance(pairs, dict):
        return f"its metrics are {describe(pairs)}; expected a dict of name -> (sum, weight)"
    for name, pair in pairs.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and _scalar(pair[0]) and _scalar(pair[1])):
            return f"the metric {name!r} is {describe(pair)}; expected (sum, weight), two numbers or 0-d tensors"
        if not isinstance(name, str) or "/" not in name:
            return f"the metric {name!r} has no prefix; name it <plugin>/{name}"
    return ""


def _scalar(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, Real)


def _column(what: str, value: Any, like: Tensor) -> str:
    """A floating [tokens] tensor on the device of ``like``."""
    if not isinstance(value, Tensor) or value.shape != like.shape or not value.is_floating_point():
        return f"{what} is {describe(value)}; expected a float Tensor [tokens] = {list(like.shape)}"
    if value.device != like.device:
        return f"{what} is on {value.device}; the batch is on {like.device}"
    return ""


def _values(what: str, value: Tensor, negative: bool) -> str:
    """Finite values [tokens], also not negative where ``negative`` is False."""
    wrong = ~torch.isfinite(value) if negative else ~(torch.isfinite(value) & (value >= 0))
    if not bool(wrong.any()):
        return ""
    at = int(wrong.nonzero()[0])
    range_ = "finite" if negative else "finite and at least 0"
    return (
        f"{what}[{at}] is {float(value[at])} ({int(wrong.sum())} of {len(value)} tokens are wrong); expected {range_}"
    )


def output(value: Any, arguments: tuple[Any, ...]) -> str:
    """An ``Output`` whose columns are those of the micro-batch."""
    _, batch, ctx = arguments
    if not isinstance(value, Output):
        return expected(value, "an Output")
    for name in ("log_probs", "entropy"):
        found = getattr(value, name)
        if found is not None and (wrong := _column(name, found, batch.tokens)):
            return wrong
    for name, pair in value.aux.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and _scalar(pair[0]) and _scalar(pair[1])):
            return f"aux[{name!r}] is {describe(pair)}; expected (sum, weight), two 0-d tensors"
    return metrics(ctx.metrics)


def correction(value: Any, arguments: tuple[Any, ...]) -> str:
    """A ``Correction`` of all tokens."""
    if not isinstance(value, Correction):
        return expected(value, "a Correction")
    like = arguments[0].mask
    if wrong := _column("Correction.weight", value.weight, like):
        return wrong
    if not isinstance(value.keep, Tensor) or value.keep.dtype != torch.bool or value.keep.shape != like.shape:
        return f"Correction.keep is {describe(value.keep)}; expected a bool Tensor [tokens] = {list(like.shape)}"
    if value.weight.requires_grad:
        return "Correction.weight has a gradient; detach it"
    if value.weight.device.type == "cpu" and (wrong := _values("Correction.weight", value.weight, negative=False)):
        return wrong
    return metrics(value.metrics)


def loss(value: Any, _: tuple[Any, ...]) -> str:
    """A ``Loss`` with one number."""
    if not isinstance(value, Loss):
        return expected(value, "a Loss")
    if not isinstance(value.value, Tensor) or value.value.dim():
        return f"Loss.value is {describe(value.value)}; expected a 0-d Tensor, the micro-batch's share of the loss"
    if torch.is_grad_enabled() and not value.value.requires_grad:
        return "Loss.value has no gradient; compute it from output.log_probs, without detach() or item()"
    return metrics(value.metrics)


def advantages(value: Any, arguments: tuple[Any, ...]) -> str:
    """A finite [tokens] tensor."""
    return _column("the advantage", value, arguments[0].mask) or _values("the advantage", value, negative=True)


def optimizer_metrics(value: Any, _: tuple[Any, ...]) -> str:
    """A dict of numbers."""
    if not isinstance(value, dict):
        return expected(value, "the dict of metrics that the inner function returned")
    wrong = next((name for name, entry in value.items() if not _scalar(entry)), None)
    return "" if wrong is None else f"the metric {wrong!r} is {describe(value[wrong])}; expected a number"


def unit(value: Any, _: tuple[Any, ...]) -> str:
    """A ``Unit`` of named tensors."""
    if not isinstance(value, Unit):
        return f"the stream holds {describe(value)}; expected Unit(tensors)"
    if not isinstance(value.tensors, dict) or not value.tensors:
        return f"Unit.tensors is {describe(value.tensors)}; expected a dict of checkpoint name -> Tensor"
    for name, tensor in value.tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            return f"Unit.tensors[{name!r}] is {describe(tensor)}; expected a Tensor under its checkpoint name"
    return ""


def shapes(found: Unit) -> dict[str, list[int]]:
    """Checkpoint name -> shape."""
    return {name: list(tensor.shape) for name, tensor in found.tensors.items()}


# -- what an event leaves behind --------------------------------------------------------------------------------------


def model_before(arguments: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Whether any weight can be trained, and how many tokens the output layer scores."""
    model = arguments["model"]
    return any(p.requires_grad for p in model.parameters()), _scored(model)


def model_after(state: tuple[bool, int | None], arguments: Mapping[str, Any]) -> str:
    """Some weight can still be trained, and the output layer still scores the vocabulary."""
    model, role = arguments["model"], arguments["role"]
    trainable, tokens = state
    if role in ("train", "shared") and trainable and not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        return f"requires_grad is False for all {count} parameters of the model to train; leave some to train"
    found = _scored(model)
    if tokens is not None and found != tokens:
        return f"the output layer (lm_head) scores {found} tokens; expected {tokens}, the model's vocabulary"
    return ""


def _scored(model: nn.Module) -> int | None:
    find = getattr(model, "get_output_embeddings", None)
    layer = find() if find is not None else None
    weight = getattr(layer, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def batch_after(_: None, arguments: Mapping[str, Any]) -> str:
    """Every column has a row per token and every scalar one per sample."""
    batch: Batch = arguments["batch"]
    tokens, count = len(batch.tokens), len(batch)
    for name, column in batch.columns.items():
        if not isinstance(column, (Tensor, Ragged)):
            return f"batch.columns[{name!r}] is {describe(column)}; expected a Tensor [tokens, ...]"
        if (found := len(column.offsets) - 1 if isinstance(column, Ragged) else _rows(column)) != tokens:
            return f"batch.columns[{name!r}] has {found} rows; expected {tokens}, one per token"
    for name, scalar in batch.scalars.items():
        if not isinstance(scalar, Tensor) or _rows(scalar) != count:
            return f"batch.scalars[{name!r}] is {describe(scalar)}; expected a Tensor of {count} rows, one per sample"
    if int(batch.lengths.sum()) != tokens:
        return f"batch.lengths add up to {int(batch.lengths.sum())}; expected {tokens}, the number of tokens"
    return ""


def _rows(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() else 0


def sample_after(_: None, arguments: Mapping[str, Any]) -> str:
    """The sample's lists are as long as its response, its fields as declared."""
    try:
        arguments["sample"].validate(arguments["run"].fields)
    except (DataError, TypeError) as error:
        return f"it left a sample that cannot be used: {error}"
    return ""


def request_after(_: None, arguments: Mapping[str, Any]) -> str:
    """The request still has a prompt, and names of fields to record."""
    request: Request = arguments["request"]
    if not request.tokens or not isinstance(request.tokens, list):
        return f"it left the request with tokens that are {describe(request.tokens)}; expected a list of token ids"
    if not isinstance(request.extras, set):
        return f"it left the request with extras that are {describe(request.extras)}; expected a set of field names"
    return ""


def step_before(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics as they were."""
    return dict(arguments["metrics"])


def step_after(state: dict[str, Any], arguments: Mapping[str, Any]) -> str:
    """Metrics that were added are numbers under a prefix."""
    for name, value in arguments["metrics"].items():
        if name in state and state[name] is value:
            continue
        if not _scalar(value):
            return f"the metric {name!r} is {describe(value)}; expected a number"
        if not isinstance(name, str) or "/" not in name:
            return f"the metric {name!r} has no prefix; name it <plugin>/{name}"
    return ""


#: hook -> how its results are checked; ``UNCHECKED`` events receive nothing that they could damage, or what core checks itself.
BOUNDARIES: dict[str, Boundary] = {
    "on_start": UNCHECKED,
    "on_model": Boundary(before=model_before, after=model_after),
    "on_further_layers": UNCHECKED,  # the trainer checks wishes against its model
    "wrap_rollout": Boundary(call=groups, kind="async"),
    "wrap_generate": Boundary(call=samples, kind="async"),
    "on_request": Boundary(after=request_after),
    "on_sample": Boundary(after=sample_after),
    "on_batch": Boundary(after=batch_after),
    "wrap_forward": Boundary(call=output),
    "wrap_correction": Boundary(call=correction),
    "wrap_loss": Boundary(call=loss),
    "wrap_weights": Boundary(call=unit, kind="stream", shapes=shapes),
    "wrap_optimizer_step": Boundary(call=optimizer_metrics),
    "on_weights_synced": UNCHECKED,
    "on_step": Boundary(before=step_before, after=step_after),
    "on_save": UNCHECKED,  # Store.put checks what it is given
    "on_load": UNCHECKED,
    "on_stop": UNCHECKED,
    "make_runtime": Boundary(part=instance_of(Runtime)),
    "make_model": Boundary(part=instance_of(nn.Module)),
    "make_trainer": Boundary(part=instance_of(Trainer)),
    "make_engine": Boundary(part=instance_of(Engine)),
    "make_decoder": Boundary(part=present),
    "make_schedule": Boundary(part=instance_of(Schedule)),
    "make_transport": Boundary(part=instance_of(Transport)),
    "make_advantage": Boundary(part=function, call=advantages),
    "make_reward": Boundary(part=function, call=reward, kind="async"),
    "make_check": UNCHECKED,  # core checks what it gets from it
    "make_generate": UNCHECKED,  # core checks what it gets from it
    "make_head": UNCHECKED,  # core checks what it gets from it
    "make_optimizer": UNCHECKED,  # core checks what it gets from it
    "make_prompts": UNCHECKED,  # core checks what it gets from it
    "on_evaluation": UNCHECKED,  # core checks what it gets from it
    "wrap_learn": UNCHECKED,  # core checks what it gets from it
}
