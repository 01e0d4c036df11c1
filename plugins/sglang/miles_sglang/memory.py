"""Estimates the GPU memory of an SGLang engine: weights in their number format, and a cache that fills SGLang's static share.

SGLang reserves a share of each GPU (``mem_fraction_static``) for weights and cache; the rest is for activations and CUDA graphs. The
default share follows ``srt/arg_groups/memory_hook.py`` of SGLang 0.5.17. Requests that do not fit into the cache wait, so a small cache
is slow but no error, unless it cannot hold one sequence. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.plugin import Facts, Parts, Problem, Usage, describe_fact
from miles_embedded import ModelSize, format_billions, longest_sample, model_size, size_of, wanted_rows

GB = 1e9
MIB = float(1 << 20)
#: Number format -> (bytes per quantised parameter including scales, whether it quantises routed experts only).
STORED: dict[str, tuple[float, bool]] = {
    "fp8": (1 + 4 / (128 * 128), False),
    "mxfp8": (1 + 1 / 32, False),
    "int4": (0.5 + 2 / 128, True),
    "nvfp4": (0.5 + 1 / 16, True),
}
#: Bytes of a CUDA context with its libraries, and of NCCL's buffers with several GPUs.
CONTEXT, CHANNELS = 1.0 * GB, 1.0 * GB
#: Shares of a GPU that the trainer uses, too: at the same time, or in turns (while it sleeps it keeps a CUDA context and buffers there). With
#: SGLang's own default (about 0.9) the engine fills the GPU.
BESIDE_A_TRAINER, IN_TURNS = 0.4, 0.8
#: Share of a GPU that should stay free; an engine that leaves less gets a warning.
MARGIN = 0.03
#: SGLang's defaults on GPUs with more than 60 GiB: ``chunked_prefill_size``, and the largest batch with a captured CUDA graph.
_CHUNK, _CAPTURED = 8192, 256
_LARGE = 60 * 1024 * MIB
_SHARE, _STEP = 0.9, 0.05


@dataclass(frozen=True)
class Server:
    """Parallel layout and memory share of one engine.

    Attributes:
        tp, pp, dp: tensor, pipeline and attention data-parallel sizes (``--sglang-enable-dp-attention``).
        fraction: share of a GPU for weights and cache.
        origin: source of the share, for messages.
        reserve: bytes that SGLang leaves for activations and CUDA graphs.
    """

    tp: int
    pp: int
    dp: int
    fraction: float
    origin: str
    reserve: float

    @property
    def gpus(self) -> int:
        """Number of GPUs of one engine."""
        return self.tp * self.pp


def server_of(facts: Facts, gpu: float) -> Server:
    """Derive the layout from a run's options. gpu: bytes of a GPU, 0 if unknown."""

    def value(name: str, default: Any) -> Any:
        return facts.value(f"sglang.{name}") or default

    pp = int(value("pp_size", 1))
    given_gpus = facts.value("ray.rollout_num_gpus_per_engine") if facts.value("plugin.ray") else None
    tp = int(value("tp_size", max(int(given_gpus or 1) // pp, 1)))
    dp = int(value("dp_size", 1)) if value("enable_dp_attention", False) else 1
    captured = int(value("cuda_graph_max_bs_decode", _CAPTURED if tp < 4 else 2 * _CAPTURED))
    mib = 512 + 1.5 * max(int(value("chunked_prefill_size", _CHUNK)), 2048) + 128 * tp * pp + 2 * captured
    mib += (3 * captured * dp if dp > 1 else 0) + (2048 if value("moe_a2a_backend", "") == "deepep" else 0)
    reserve = max(mib, 10240 if gpu > _LARGE else 0) * MIB
    given = facts.value("sglang.mem_fraction_static")
    if given is not None:
        return Server(
            tp, pp, dp, float(given), f"--sglang-mem-fraction-static {given}", min(reserve, (1 - given) * gpu)
        )
    share = default_share(facts.value("runtime"), facts.value("colocate"))
    if share is not None:
        return Server(tp, pp, dp, share, "default on a trainer's GPU", min(reserve, (1 - share) * gpu))
    return Server(tp, pp, dp, max((gpu - reserve) / gpu, 0.0) if gpu else 0.0, "SGLang's default", reserve)


def free_memory(facts: Facts) -> float:
    """Return the bytes of a GPU that are free when SGLang starts, of which it takes its share; 0 if unknown. A trainer that takes turns
    with the engine keeps its CUDA context and NCCL's buffers."""
    gpu = float(facts.value("gpu.memory_gb") or 0) * GB
    return max(gpu - (CONTEXT + CHANNELS if facts.value("colocate") else 0.0), 0.0)


def default_share(runtime: Any, colocate: Any) -> float | None:
    """Return the share of a GPU that an engine takes without ``--sglang-mem-fraction-static``; None for SGLang's default."""
    if colocate:
        return IN_TURNS
    return BESIDE_A_TRAINER if runtime == "inline" else None


def largest_precision(facts: Facts) -> str:
    """Return the precision in which the engine's weights take most memory: BF16 if the run begins with a warm-up in it."""
    return "bf16" if facts.value("precision.warmup_steps") else str(facts.value("rollout.precision") or "bf16")


def weight_bytes(size: ModelSize, precision: str) -> float:
    """Return the bytes of a model's weights in a number format. Embeddings, output layer, norms and routers stay in BF16."""
    stored, experts_only = STORED.get(precision, (2.0, False))
    plain = size.embeddings + 2 * size.hidden * size.layers
    quantised = size.experts if experts_only else size.parameters - plain
    return 2.0 * (size.parameters - quantised) + stored * quantised


def weights_on_gpu(facts: Facts, size: ModelSize, server: Server) -> float:
    """Return the bytes of the weights on one GPU. With data-parallel attention every GPU has all weights of its stage's attention."""
    precision = largest_precision(facts)
    stored, experts_only = STORED.get(precision, (2.0, False))
    attention = (2.0 if experts_only else stored) * size.attentions / server.pp
    tower = (
        2.0 * size.tower.parameters / server.tp if size.tower else 0.0
    )  # on the first pipeline stage, also without --media
    return weight_bytes(size, precision) / server.gpus + attention * (server.dp - 1) / server.tp + tower


def cache_bytes_per_token(facts: Facts, size: ModelSize, server: Server) -> float:
    """Return the cache bytes of one token on one GPU. Tensor parallelism splits KV heads, but not a latent (MLA) cache."""
    width = 1.0 if str(facts.value("rollout.kv_cache_dtype")).startswith("float8") else 2.0
    return width * size.cached / server.pp / min(max(server.tp // server.dp, 1), size.heads)


def state_bytes_per_sequence(size: ModelSize, server: Server) -> float:
    """Return the bytes of the states of one sequence on one GPU. Tensor parallelism splits their heads. SGLang keeps further copies for cached
    prefixes, in what its cache has left."""
    return size.state_bytes(2) / server.pp / max(server.tp // server.dp, 1)


def draft_bytes(facts: Facts, size: ModelSize) -> float:
    """Return the bytes of the draft: a separate model or the checkpoint's MTP layer; 0 without speculative decoding."""
    if not facts.value("sglang.speculative_algorithm"):
        return 0.0
    path = facts.value("sglang.speculative_draft_model_path")
    if not path:
        return 2.0 * size.mtp
    try:
        config = json.loads((Path(str(path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a model id on a hub; its size is unknown here
        return 0.0
    found = model_size(config, 0)
    return 2.0 * found.parameters if found else 0.0


def usage(facts: Facts, model: Mapping[str, Any]) -> Iterator[Usage]:
    """Implements ``miles_core.plugin.Plugin.memory``. Yields nothing for a server that this run did not start, or on a CPU."""
    size = size_of(facts, model)
    if size is None or facts.value("engine") != "sglang" or facts.value("sglang.url"):
        return
    if facts.value("model.device") == "cpu":
        return
    gpu = free_memory(facts)
    server = server_of(facts, gpu)
    precision = largest_precision(facts)
    held, drafts = weights_on_gpu(facts, size, server), draft_bytes(facts, size) / server.gpus
    each, (longest, why), rows = cache_bytes_per_token(facts, size, server), longest_sample(facts), wanted_rows(facts)
    state = state_bytes_per_sequence(size, server)
    sequence = longest * each + state
    pool = max(server.fraction * gpu - held - drafts, 0.0) if gpu else rows * sequence
    other = CONTEXT + (CHANNELS if server.gpus > 1 else 0)
    note = f"engine: {precision} weights on {server.gpus} GPU{'s' * (server.gpus > 1)}"
    if gpu:
        fitting = int(pool // sequence) * server.dp  # with data-parallel attention each GPU's cache has other sequences
        tokens = int((pool * server.dp - min(fitting, rows) * state) / each) if each else 0
        enough = f"all {rows:,} of the engine's" if fitting >= rows else f"{fitting:,} of up to {rows:,}"
        note += (
            f", {server.fraction:.2f} of each for weights and cache ({server.origin}): the cache holds {tokens:,} tokens, enough for "
            f"{enough} concurrent sequences of maximum length ({longest:,} tokens: {why})"
        )
    else:
        note += f"; a cache of {rows:,} sequences of {longest:,} tokens ({why})"
    if state:
        note += f"; the states of a sequence take {state / 1e6:.1f} MB of it"
    parts = Parts(weights=held, draft=drafts, cache=pool, other=max(server.reserve, other))
    note += _warn_of_full_gpu(facts, gpu, server, parts.total)
    usable = (
        math.inf if gpu and bytes_needed(facts, size, server) > server.fraction * gpu else 1.0
    )  # ``find_size_problems`` reports it
    yield Usage(
        "engine",
        "GPU",
        parts,
        other,
        usable=usable,
        note=note,
        fitting=lambda budget, alone: _propose_smaller(facts, size, budget, gpu),
    )


def _warn_of_full_gpu(facts: Facts, gpu: float, server: Server, total: float) -> str:
    """Return a warning if an engine leaves less than ``MARGIN`` of a GPU free; else an empty text. gpu: bytes that are free for it."""
    physical = float(facts.value("gpu.memory_gb") or 0) * GB
    filled = total + physical - gpu
    if not physical or filled <= (1 - MARGIN) * physical:
        return ""
    share = max(server.fraction - (filled - (1 - MARGIN) * physical) / gpu, 0.0)
    return (
        f"; warning: it fills {filled / GB:.1f} of {physical / GB:.0f} GB ({server.reserve / GB:.0f} of them for activations and CUDA graphs), so "
        f"that less than {MARGIN:.0%} stay free: --sglang-mem-fraction-static {math.floor(share * 100) / 100:.2f} leaves that much for other "
        "processes and longer prompts"
    )


def find_size_problems(facts: Facts, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Report a problem if weights and the cache of one sequence do not fit into SGLang's share, so that it could not start."""
    gpu = free_memory(facts)
    size = None if model is None else size_of(facts, model)
    if not gpu or size is None or facts.value("engine") != "sglang" or facts.value("sglang.url"):
        return
    if facts.value("model.device") == "cpu":
        return
    server = server_of(facts, gpu)
    needed = bytes_needed(facts, size, server)
    if needed <= server.fraction * gpu:
        return
    precision = largest_precision(facts)
    values = (
        describe_fact(facts.lookup("gpu.memory_gb")),
        (
            f"{precision} weights",
            f"{weight_bytes(size, precision) / GB:.1f} GB",
            f"{format_billions(size.parameters)} parameters",
        ),
        (
            "GPUs of an engine",
            str(server.gpus),
            "--sglang-tp-size x --sglang-pp-size, or --rollout-num-gpus-per-engine",
        ),
        ("share for weights and cache", f"{server.fraction:.2f}", server.origin),
    )
    because = (
        f"weights and the cache of one sequence of {longest_sample(facts)[0]:,} tokens take {needed / GB:.1f} GB on each GPU of an engine, "
        f"but SGLang may use only {server.fraction * gpu / GB:.1f} GB"
    )
    yield Problem(
        "sglang",
        "an engine that fits the model",
        because,
        values,
        tries=lambda: _propose_smaller(facts, size, gpu, gpu),
    )


def bytes_needed(facts: Facts, size: ModelSize, server: Server) -> float:
    """Return the bytes of weights and of the cache of one sequence on one GPU."""
    held = weights_on_gpu(facts, size, server) + draft_bytes(facts, size) / server.gpus
    sequence = longest_sample(facts)[0] * cache_bytes_per_token(facts, size, server)
    return held + sequence + state_bytes_per_sequence(size, server)


def _propose_smaller(facts: Facts, size: ModelSize, budget: float, gpu: float) -> Iterator[dict[str, Any]]:
    """Propose option changes with which the engine uses at most ``budget`` bytes per GPU: a smaller share, then more GPUs."""
    server = server_of(facts, gpu)
    if not gpu:
        return
    shares = [round(_SHARE - _STEP * n, 2) for n in range(int(_SHARE / _STEP))]
    found = next(
        (f for f in shares if f * gpu + server.reserve <= budget and f * gpu >= bytes_needed(facts, size, server)),
        None,
    )
    if found is not None and found != server.fraction:
        yield {"sglang.mem_fraction_static": found}
    for tp in (server.tp << n for n in range(1, 6)):
        wider = Server(tp, server.pp, server.dp, server.fraction, server.origin, server.reserve)
        if bytes_needed(facts, size, wider) <= min(server.fraction * gpu, budget):
            chosen = {"sglang.tp_size": tp} if facts.value("sglang.tp_size") else {}
            yield {**chosen, **_on_gpus(facts, wider.gpus)}
            return


def _on_gpus(facts: Facts, gpus: int) -> dict[str, Any]:
    """Return the options that assign ``gpus`` GPUs to an engine."""
    found: dict[str, Any] = {"runtime": "ray", "ray.rollout_num_gpus_per_engine": gpus}
    rollout = facts.value("ray.rollout_num_gpus") if facts.value("plugin.ray") else None
    return {**found, "ray.rollout_num_gpus": gpus} if rollout is not None and rollout % gpus else found
