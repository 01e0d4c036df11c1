"""How to start vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from miles_core.plugin import StateKey, model_facts
from miles_formats import Codec, make_codec
from miles_formats.convert import Layout, layout
from miles_vllm import plugin, receiver
from miles_vllm.adapters import adapter_arguments
from miles_vllm.config import read_args
from miles_vllm.engine import Settings, VllmEngine
from miles_vllm.link import Link
from miles_vllm.memory import ALTERNATING, BESIDE
from miles_vllm.pool import MESSAGE_BYTES, PoolLink
from miles_vllm.process import Launch, ProcessLink
from miles_vllm.requests import Translator
from miles_vllm.server import FLAG, SAME, Needs
from miles_vllm.shared import SharedLink
from miles_workers import (
    ProgramChoices,
    Restarts,
    Routing,
    choices_of_run,
    language_config,
    policies_sharing,
    worker_name,
)
from miles_workers.servers import SameModel, Shared, check_servers, report_news, share

#: Tokens that vLLM's context has in addition: a request that scores a full context generates a token.
_SLACK = 1
#: Bytes of the cache on a CPU, where vLLM would take most of the memory.
_CPU_CACHE = 1 << 30
#: Checkpoint and choices -> the vLLM that several engines of this process use.
SERVERS = StateKey[dict[str, Shared[Link]]]()
_ENVIRONMENT = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # _SLACK may exceed the model's limit
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, kw_only=True)
class Choices(ProgramChoices):
    """How to start vLLM; ``arguments`` are further arguments of ``AsyncEngineArgs``.

    Attributes:
        adapters: arguments of vLLM for adapters; empty if the engine receives all weights.
        name: name of vLLM's process.
    """

    name: str = "vllm"
    adapters: Mapping[str, Any] = field(default_factory=dict)


def make_engine(run: Any, policy: Any) -> VllmEngine:
    """Provider of ``--engine vllm``."""
    check_servers(run, policy, plugin.name)
    choices = _choices(run, policy)
    shared = run.state.setdefault(SERVERS, {}) if run.config_of(policy).run.transport == "adapter" else None
    codec, directory = make_codec(run, policy), Path(run.directory)
    detokenize = partial(run.tokenizer.decode, skip_special_tokens=True)
    engine = assemble(policy.hf_checkpoint, codec, detokenize, directory, choices, shared)
    report_news(run, plugin.name, engine.link.news)
    return engine


def _choices(run: Any, policy: Any) -> Choices:
    """Return the choices for a policy's engine, which shares vLLM with those of other policies if the engine receives adapters."""
    own = _own_choices(run, policy)
    if run.config_of(policy).run.transport != "adapter":
        return own
    options = [run.config_of(other).plugin("lora") for other in policies_sharing(run, policy, _own_choices)]
    return replace(own, adapters=adapter_arguments(options, policy.hf_checkpoint))


def _own_choices(run: Any, policy: Any) -> Choices:
    config = run.config_of(policy)
    options = config.plugin(plugin.name)
    name = "" if config.run.transport == "adapter" else policy.name
    return Choices(
        **choices_of_run(run, config, options),
        arguments=_arguments(config, options),
        name="-".join(filter(None, (worker_name(), name, "vllm"))),
    )


def assemble(
    checkpoint: str | Path,
    codec: Codec,
    detokenize: Callable[[list[int]], str],
    directory: Path,
    choices: Choices,
    shared: dict[str, Shared[Link]] | None = None,
) -> VllmEngine:
    """Create an engine for a checkpoint without starting it.

    Args:
        checkpoint: Hugging Face checkpoint directory.
        codec: codec of the weight updates.
        detokenize: converts token ids to text without special tokens.
        directory: the run directory.
        choices: how to start vLLM.
        shared: the vLLMs that several engines use, by checkpoint and choices; None if this engine receives all weights.
    """
    config = language_config(checkpoint)
    context = choices.max_context or int(config["max_position_embeddings"])
    described = layout(checkpoint, codec)
    routing = choices.routing(config)
    connect = partial(_connect, Path(checkpoint), config, described, directory, choices, context)
    link = connect() if shared is None else SharedLink(share(shared, repr((str(checkpoint), choices)), connect))
    settings = Settings(
        Translator(detokenize, context, routing),
        {f.name: f.value for f in model_facts(str(checkpoint))},
        _capabilities(choices, routing),
        has_weights=described.stored,
        bucket_bytes=min(choices.bucket_bytes, MESSAGE_BYTES) if choices.url else choices.bucket_bytes,
        sends_in="message" if choices.url else choices.device,
        allow_mismatch=choices.allow_mismatch,
        restarts=Restarts(choices.max_restarts),
    )
    engine = VllmEngine(link, settings)
    engine.kv_cache_dtype = "" if choices.kv_cache_dtype == "auto" else choices.kv_cache_dtype
    return engine


def _connect(
    checkpoint: Path, config: Mapping[str, Any], described: Layout, directory: Path, choices: Choices, context: int
) -> Link:
    """Return the link to running servers, or to a process that starts vLLM."""
    tied, layers = bool(config.get("tie_word_embeddings")), config.get("num_hidden_layers")
    expected = [list(described.names), tied, layers]
    if choices.url:
        model = SameModel(checkpoint, config, FLAG, "vLLM", SAME, receives=not choices.adapters)
        needs = Needs(str(checkpoint), () if choices.adapters else expected, choices.max_context, choices.adapters)
        return PoolLink(choices.url, choices.startup_timeout, model, needs, choices.weights_dir)
    arguments = _defaults(choices, context) | _model(checkpoint, described, directory) | dict(choices.arguments)
    return ProcessLink(
        Launch(
            arguments | dict(choices.adapters), _ENVIRONMENT, expected, directory, choices.name, choices.startup_timeout
        )
    )


def _model(checkpoint: str | Path, described: Layout, directory: Path) -> dict[str, Any]:
    """Return the model arguments. If the checkpoint is quantised, the first sync sends the dequantised weights."""
    if described.stored:
        return {"model": str(checkpoint)}
    described.write(directory / "vllm-model")
    return {"model": str(directory / "vllm-model"), "load_format": "dummy"}


def _arguments(config: Any, options: Any) -> dict[str, Any]:
    """Return the arguments that options of this plugin and the placement of the run determine."""
    found = read_args(options.args)
    tensor_parallel = options.tensor_parallel_size
    if tensor_parallel is None and config.run.runtime == "ray":
        tensor_parallel = max(config.plugin("ray").rollout_num_gpus_per_engine, 1)
    beside = BESIDE if config.run.runtime == "inline" else None
    share = options.gpu_memory_utilization or (ALTERNATING if config.run.colocate else beside)
    given = {"tensor_parallel_size": tensor_parallel, "gpu_memory_utilization": share}
    switches = ("enforce_eager", "enable_sleep_mode", "enable_return_routed_experts")
    found |= {name: value for name, value in given.items() if value is not None}
    return found | {name: True for name in switches if getattr(options, name)}


def _defaults(choices: Choices, context: int) -> dict[str, Any]:
    """Return the arguments that the engine determines, and defaults on a CPU."""
    on_cpu = {"kv_cache_memory_bytes": _CPU_CACHE, "enforce_eager": True} if choices.device == "cpu" else {}
    return on_cpu | {
        "dtype": choices.computed_dtype,
        "seed": choices.seed,
        "max_model_len": context + _SLACK,
        "max_num_seqs": choices.max_running_requests,
        "kv_cache_dtype": choices.kv_cache_name,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": receiver.NAME,
        "disable_log_stats": True,
    }


def _capabilities(choices: Choices, routing: Routing | None) -> frozenset[str]:
    """Return the capabilities of the manifest whose conditions hold for these choices."""
    holds = {
        "sleep": bool(choices.arguments.get("enable_sleep_mode")),
        "transport:buckets": not choices.url,
        "routed_experts": routing is not None,
    }
    return frozenset(c.name for c in plugin.list_capabilities("engine") if holds.get(c.name, True))
