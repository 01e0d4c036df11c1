"""Code that runs inside SGLang's schedulers. SGLang loads it through its plugin entry point ``sglang.srt.plugins`` (name ``miles``).

It is active only in an SGLang that this plugin started, and makes these changes:

- Routed experts leave a scheduler as int32 and pass three processes. For models with at most 256 experts they are sent as uint8, in
  objects (``record``) that are pickled in a fraction of a tensor's time, or as references to files in memory (``record_files``).
- The record of routed experts is kept in GPU memory (``routes``). SGLang copies it to host memory in every step. It is read once for all
  requests that finish in the same step.
- A model that starts without weights is filled with random numbers, including the scales of the cached keys and values. Updates do not
  include these scales, so they are reset to "not set".
- How INT4 weights are loaded is remembered before SGLang packs them, so that updates can replace them (``repacking``).
- A checkpoint with tied embeddings stores the embedding only. Models of SGLang that have a separate output layer receive it as well.
- A scheduler reads the tokenizer's EOS token id for each generated token, and Transformers looks it up each time. It is cached.
- A draft of its own is marked, so that updates reach it (``loader``). The projection of an EAGLE head without a bias has none.
- Requests continue with new weights (``retraction``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from miles_sglang import record_files, retraction
from miles_sglang.record import Record

#: Environment variable of an SGLang that this plugin started; its value is the dtype in which routed experts are sent.
VARIABLE = "MILES_SGLANG_ROUTES"
#: Maximum number of experts whose indices fit into ``uint8``.
MOST = 256
#: SGLang's dtype of expert indices.
WIDE = "int32"
_READS = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"
_FILLS = "sglang.srt.model_loader.loader.initialize_dummy_weights"
_BUILDS = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_RECORDS = "sglang.srt.model_executor.model_runner.ModelRunner.init_routed_experts_capturer"
_COLLECTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_SENDS = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"

#: Whether SGLang pickles messages between its processes. Its other format (``SGLANG_USE_PICKLE_IPC=0``) sends tensors only.
_pickles = True
#: Writes records to files; None if they are sent in answers.
_writer: record_files.RecordWriter | None = None
#: Requests that finished in this step, whose records were kept in host memory.
_finished: list[Any] = []


def digest() -> str:
    """Return a digest of the source of the modules that run inside SGLang's schedulers."""
    modules = ("inside", "loader", "coverage", "record", "record_files", "repacking", "retraction", "routes")
    texts = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in modules]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def install() -> None:
    """Register the changes. SGLang calls this in each of its processes before it starts."""
    global _pickles, _writer
    if VARIABLE not in os.environ:
        return
    from sglang.srt.environ import envs
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _pickles = envs.SGLANG_USE_PICKLE_IPC.get()
    directory = os.environ.get(record_files.VARIABLE)
    _writer = record_files.RecordWriter(Path(directory)) if directory else None
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_tokenizer", cache_eos_token_id, HookType.AFTER)
    HookRegistry.register(_FILLS, prepare_random_weights, HookType.AFTER)
    HookRegistry.register(_READS, prepare_loading, HookType.BEFORE)
    HookRegistry.register(_BUILDS, mark_draft, HookType.AFTER)
    HookRegistry.register(_RECORDS, keep_routes, HookType.AFTER)
    HookRegistry.register(f"{_COLLECTS}._maybe_collect_routed_experts", complete_routes, HookType.AROUND)
    HookRegistry.register(f"{_SENDS}.stream_output", send_routes, HookType.BEFORE)
    retraction.register(HookRegistry.register, HookType)
    Scheduler.miles_digest = _check_digest
    Scheduler.miles_coverage = check_coverage


def cache_eos_token_id(_: None, scheduler: Any) -> None:
    """Cache the tokenizer's EOS token id as a class attribute."""
    tokenizer = scheduler.tokenizer
    if tokenizer is not None:
        kind = type(tokenizer)
        tokenizer.__class__ = type(kind.__name__, (kind,), {"eos_token_id": tokenizer.eos_token_id})


def prepare_loading(
    model: Any, weights: Iterable[tuple[str, Any]], *more: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Load a tied checkpoint's embedding into the output layer too if SGLang's model has both. Weights that SGLang packs afterwards are
    remembered as they are loaded. SGLang gives every EAGLE head a bias, and leaves it random if the head's checkpoint has none."""
    from miles_sglang import repacking
    from miles_sglang.coverage import tied_head

    def streamed() -> Iterator[tuple[str, Any]]:
        for entry in weights:
            yield entry
            yield from tied_head(model, [entry])

    repacking.remember(model)
    _clear_bias(model)
    return (model, streamed(), *more), {}


def prepare_random_weights(_: None, model: Any, *more: Any) -> None:
    """Set the scales of the cached keys and values to -1, which SGLang interprets as "not set", and remember how weights are loaded that
    SGLang packs afterwards."""
    from miles_sglang import repacking

    repacking.remember(model)
    for name, parameter in model.named_parameters():
        if name.endswith((".k_scale", ".v_scale")):
            parameter.data.fill_(-1.0)
    _clear_bias(model)


def _clear_bias(model: Any) -> None:
    """Set the bias of an EAGLE head's projection to zero."""
    if (bias := dict(model.named_parameters()).get("model.fc.bias")) is not None:
        bias.data.zero_()


def mark_draft(_: None, runner: Any) -> None:
    """Mark a draft that is a model or a head of its own, so that it loads its own weights of an update."""
    from miles_sglang.loader import SEPARATE

    arguments = runner.server_args
    if runner.is_draft_worker and arguments.speculative_draft_model_path not in (None, arguments.model_path):
        setattr(runner.model, SEPARATE, True)


def keep_routes(_: None, runner: Any) -> None:
    """Keep the record of routed experts in GPU memory."""
    from miles_sglang.routes import keep_on_gpu

    keep_on_gpu(runner, os.environ[VARIABLE])


def complete_routes(collect: Callable[..., None], processor: Any, request: Any) -> None:
    """Note a finished request for ``send_routes``, and read its routed experts if they are kept in host memory."""
    import torch

    from miles_sglang import routes

    if (table := routes.table()) is not None:
        if request.return_routed_experts:
            table.finish(request, processor.req_to_token_pool)
        return
    collect(processor, request)
    if request.routed_experts is not None:
        request.routed_experts = request.routed_experts.to(getattr(torch, os.environ[VARIABLE]))
        _finished.append(request)


def send_routes(streamer: Any, *_: Any, **__: Any) -> None:
    """Convert the routed experts of the requests that finished in this step to the form in which SGLang sends them next.

    They are read here if they are kept in GPU memory. Of the schedulers that compute the same requests, one has a socket and sends."""
    from miles_sglang import routes

    table = routes.table()
    finished = _finished.copy() if table is None else table.collect()
    _finished.clear()
    if not finished or streamer.send_to_detokenizer.socket is None:
        return
    for request in finished:
        retraction.restore_routes(request)
    records = [request.routed_experts.numpy() for request in finished]
    sent = _writer.write(records) if _writer is not None else [record.tobytes() for record in records]
    for request, data in zip(finished, sent, strict=True):
        request.routed_experts = _sendable(data)


def _sendable(data: bytes) -> Any:
    """Return an object from which the detokenizer obtains the bytes of a record or of a reference."""
    import torch

    return Record(data) if _pickles else torch.frombuffer(bytearray(data), dtype=torch.uint8)


def check(engine: Any) -> None:
    """Check that the schedulers loaded this module. SGLang only logs when it cannot load a plugin.

    Raises:
        RuntimeError: the schedulers loaded no plugin, or another version of it.
    """
    # data-parallel schedulers do not support collective_rpc
    if VARIABLE not in os.environ or engine.server_args.enable_dp_attention:
        return
    try:
        engine.collective_rpc("miles_digest", expected=digest())
    except AssertionError as error:
        raise RuntimeError(
            f"SGLang's schedulers did not load the scheduler code of miles-plugin-sglang ({error}): reinstall it, and add miles to "
            "SGLANG_PLUGINS or unset that variable"
        ) from error


def ask_coverage(engine: Any) -> str:
    """Return a description of the parameters that the first update did not write; empty if it wrote all, or with dp attention."""
    if engine.server_args.enable_dp_attention:  # data-parallel schedulers do not support collective_rpc
        return ""
    try:
        engine.collective_rpc("miles_coverage")
    except AssertionError as error:
        return str(error)
    return ""


def check_coverage(scheduler: Any) -> None:
    """Runs in a scheduler. Raises RuntimeError with the names of parameters that the first update did not write."""
    from miles_sglang.loader import unwritten_parameters

    model = scheduler.tp_worker.model_runner.model
    if names := unwritten_parameters(model):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise RuntimeError(f"{', '.join(names[:3])}{more} of SGLang's {type(model).__name__}")


def _check_digest(scheduler: Any, expected: str) -> None:
    if digest() != expected:
        raise RuntimeError(f"its digest is {digest()}, not {expected}")
