"""This plugin's half inside SGLang's schedulers, which load it through their own plugins (entry point ``miles`` of
``sglang.srt.plugins``). It does nothing in an SGLang that was not started by this plugin.

Routed experts leave a scheduler as int32, and pass three processes. Where a model has at most 256 experts they leave as one byte.

A model that is started without weights is filled with random numbers, and its scales of the cached keys and values with it: attention
would multiply by them for ever, because an update does not hold them.

A checkpoint that ties its output layer to its embedding holds one of the two. Some models of SGLang have both.

A scheduler asks its tokenizer for the number of the token that ends a text once for each token that it generates, and Transformers looks
it up each time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

#: Set for the processes of an SGLang that this plugin started: the dtype in which routed experts are to travel.
VARIABLE = "MILES_SGLANG_ROUTES"
#: The most experts that ``uint8`` can number.
MOST = 256
#: The dtype in which SGLang has them.
WIDE = "int32"
_READS = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
_FILLS = "sglang.srt.model_loader.loader.initialize_dummy_weights"
_COLLECTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


def digest() -> str:
    """Of the modules that run inside SGLang's schedulers."""
    texts = [Path(__file__).with_name(name).read_bytes() for name in ("inside.py", "loader.py", "coverage.py")]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def install() -> None:
    """What SGLang calls in each of its processes before it starts."""
    if VARIABLE not in os.environ:
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_tokenizer", settled, HookType.AFTER)
    HookRegistry.register(_FILLS, unscaled, HookType.AFTER)
    HookRegistry.register(_READS, read_tied_head, HookType.BEFORE)
    if os.environ[VARIABLE] != WIDE:
        HookRegistry.register(f"{_COLLECTS}._maybe_collect_routed_experts", narrow, HookType.AFTER)
    Scheduler.miles_digest = _same
    Scheduler.miles_coverage = check_coverage


def settled(_: None, scheduler: Any) -> None:
    """Keep the number of the token that ends a text where it is found at once."""
    tokenizer = scheduler.tokenizer
    if tokenizer is not None:
        kind = type(tokenizer)
        tokenizer.__class__ = type(kind.__name__, (kind,), {"eos_token_id": tokenizer.eos_token_id})


def read_tied_head(
    model: Any, weights: Iterable[tuple[str, Any]], *more: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read a checkpoint's embedding into the output layer too, where the checkpoint ties them and SGLang's model has both."""
    from miles_sglang.coverage import tied_head

    def streamed() -> Iterator[tuple[str, Any]]:
        for entry in weights:
            yield entry
            yield from tied_head(model, [entry])

    return (model, streamed(), *more), {}


def unscaled(_: None, model: Any, *more: Any) -> None:
    """Take the scales of the cached keys and values as not given, which SGLang knows by their being negative."""
    for name, parameter in model.named_parameters():
        if name.endswith((".k_scale", ".v_scale")):
            parameter.data.fill_(-1.0)


def narrow(_: None, processor: Any, request: Any) -> None:
    """Store a request's routed experts in the dtype they are to travel in."""
    import torch

    if request.routed_experts is not None:
        request.routed_experts = request.routed_experts.to(getattr(torch, os.environ[VARIABLE]))


def check(engine: Any) -> None:
    """Ask an engine's scheduler which half it loaded: SGLang goes on without a plugin that it cannot load.

    Raises:
        RuntimeError: another one than is here, or none.
    """
    if VARIABLE not in os.environ or engine.server_args.enable_dp_attention:  # such schedulers cannot be asked
        return
    try:
        engine.collective_rpc("miles_digest", expected=digest())
    except AssertionError as error:
        raise RuntimeError(
            f"SGLang's schedulers did not load what miles-plugin-sglang runs inside them ({error}): install it anew, and name miles in "
            "SGLANG_PLUGINS or leave that out"
        ) from error


def ask_coverage(engine: Any) -> str:
    """Ask an engine's scheduler which parameters of its model the first update did not reach; empty when it reached all."""
    if engine.server_args.enable_dp_attention:  # such schedulers cannot be asked
        return ""
    try:
        engine.collective_rpc("miles_coverage")
    except AssertionError as error:
        return str(error)
    return ""


def check_coverage(scheduler: Any) -> None:
    """RuntimeError where a parameter of the scheduler's model was not written by the first update; names it."""
    from miles_sglang.loader import unwritten

    model = scheduler.tp_worker.model_runner.model
    if names := unwritten(model):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise RuntimeError(f"{', '.join(names[:3])}{more} of SGLang's {type(model).__name__}")


def _same(scheduler: Any, expected: str) -> None:
    if digest() != expected:
        raise RuntimeError(f"its digest is {digest()}, not {expected}")
