"""Builds the engine from a run's configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.plugin import ConfigError, StateKey, config_facts, model_facts
from miles_formats import Codec, make_codec
from miles_formats.convert import Layout, layout
from miles_sglang import inside, loader, plugin, standby
from miles_sglang.adapter_layout import names_experts
from miles_sglang.adapters import adapter_arguments
from miles_sglang.capture import graph_arguments
from miles_sglang.choices import Choices
from miles_sglang.config import server_arguments
from miles_sglang.engine import SglangEngine
from miles_sglang.formats import CAPABILITIES, compiles
from miles_sglang.images import ImageReader
from miles_sglang.link import Link
from miles_sglang.memory import default_share
from miles_sglang.pool import SAME, connect_pool
from miles_sglang.process import ProcessLink
from miles_sglang.responses import Translator
from miles_sglang.settings import Served, Settings
from miles_sglang.shapes import check_blocks
from miles_sglang.shared import SharedLink
from miles_sglang.spawn import EARLY, Spawned
from miles_workers import Restarts, choices_of_run, language_config, policies_sharing, worker_name
from miles_workers.servers import SameModel, Shared, check_servers, report_news, share
from miles_workers.transport import WeightNames

if TYPE_CHECKING:
    from miles_embedded import ImageProcessor

#: Defaults that a user may override: no grammar backend; on a CPU, the backends that SGLang supports there.
_DEFAULTS: dict[str, Any] = {"grammar_backend": "none", "log_level": "info"}
_ON_CPU: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
}
#: By default SGLang kills a scheduler whose forward pass takes longer than 300 s. Compiling kernels for packed formats in the first
#: forward pass takes longer.
_COMPILES: dict[str, Any] = {"watchdog_timeout": 3600.0}
#: SGLang ends a sequence this many tokens before its ``context_length``.
_CONTEXT_SLACK = 8


#: SGLang's environment variable with the dtype of the states of short convolutions.
_STATES = "SGLANG_MAMBA_CONV_DTYPE"
#: Environment variable of an SGLang in which ``true_on_policy`` replaces kernels.
_EXACT = "MILES_TRUE_ON_POLICY"
#: Base and choices -> the SGLang that several engines of this process use.
SERVERS = StateKey[dict[str, Shared[Link]]]()
#: Name of the file of SGLang's output.
LOG = "sglang.log"
#: Whether SGLang compiles its FP8 kernels for all 16,384 sizes before the first request, at a few kernels per second. A rollout needs few
#: sizes; SGLang compiles those on first use and caches them on disk.
PRECOMPILES = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"


def make_engine(run: Any, policy: Any) -> SglangEngine:
    """Provider of ``--engine sglang``."""
    from miles_embedded import find_processor  # imports Transformers

    check_servers(run, policy, plugin.name)
    early = run.state.get(EARLY, {})
    config = run.config_of(policy)

    def codec_of(precision: str) -> Codec:
        return make_codec(run, policy, precision)

    checkpoint, directory = policy.hf_checkpoint, log_file_of(run).parent
    # a warm-up begins in another precision, and sizes that the later one does not fit must stop the run here
    check_blocks(language_config(checkpoint), codec_of(config.rollout.precision))
    choices = _choices(run, policy)
    processor = find_processor(run, policy)
    shared = run.state.setdefault(SERVERS, {}) if config.run.transport == "adapter" else None
    codec, detokenize = make_codec(run, policy), partial(run.tokenizer.decode, skip_special_tokens=True)
    engine = assemble(checkpoint, codec, detokenize, directory, choices, early, codec_of, processor, shared)
    report_news(run, plugin.name, engine.link.news)
    return engine


def log_file_of(run: Any) -> Path:
    """Return the file of SGLang's output. The engines of a run write their files at the same time, each in a directory of its own."""
    return Path(run.directory) / "sglang" / worker_name() / LOG


def environment_of(run: Any, policy: Any) -> dict[str, str | None] | None:
    """Return the environment variables for SGLang's processes; None if this run does not start SGLang."""
    choices = _choices(run, policy)
    if choices.url:
        return None
    return _environment(choices, language_config(policy.hf_checkpoint))


def _choices(run: Any, policy: Any) -> Choices:
    """Return the choices for a policy's engine, which shares SGLang with those of other policies if the engine receives adapters."""
    own = _own_choices(run, policy)
    if run.config_of(policy).run.transport != "adapter":
        return own
    options = [run.config_of(each).plugin("lora") for each in policies_sharing(run, policy, _own_choices)]
    moe = bool(run.plan.fact("model.moe"))
    experts = any(names_experts(each.target_modules, moe) for each in options)
    # the other runners that SGLang chooses for some formats and GPUs add no adapters
    runner = {"moe_runner_backend": "triton"} if experts and run.config_of(policy).rollout.precision != "int4" else {}
    return replace(own, arguments={**adapter_arguments(options, experts), **runner, **own.arguments})


def _own_choices(run: Any, policy: Any) -> Choices:
    config = run.config_of(policy)
    options = config.plugin(plugin.name)
    common = choices_of_run(run, config, options)
    return Choices(
        **common,
        arguments={**_tensor_parallel(config, common["device"]), **server_arguments(options)},
        python_path=options.python_path or "",
        share=default_share(config.run.runtime, config.run.colocate),
        trains_draft=run.plan.holds("plugin.speculative and sglang.speculative_draft_model_path"),
        exact=run.plan.holds("plugin.true_on_policy"),
    )


def _tensor_parallel(config: Any, device: str) -> dict[str, int]:
    """Return ``tp_size`` if the runtime assigns GPUs to each engine: the engine's GPUs divided by the configured pipeline stages."""
    if config.run.runtime != "ray" or device != "cuda":
        return {}
    stages = config.plugin(plugin.name).pp_size or 1
    return {"tp_size": max(config.plugin("ray").rollout_num_gpus_per_engine // stages, 1)}


def assemble(
    checkpoint: str | Path,
    codec: Codec,
    detokenize: Callable[[list[int]], str],
    directory: Path,
    choices: Choices,
    early: dict[Path, Spawned] | None = None,
    codec_of: Callable[[str], Codec] | None = None,
    processor: ImageProcessor | None = None,
    shared: dict[str, Shared[Link]] | None = None,
) -> SglangEngine:
    """Create an engine for a checkpoint without starting it.

    Args:
        checkpoint: Hugging Face checkpoint directory.
        codec: codec of the weight updates.
        detokenize: converts token ids to text without special tokens.
        directory: where the engine writes its log and the model directory that SGLang starts from.
        choices: how to start SGLang.
        early: see ``ProcessLink``.
        codec_of, processor: precision -> codec, for ``SglangEngine.rebuild``, and processor of images; None without.
        shared: the SGLangs that several engines use, by base and choices; None if this engine receives whole weights.
    """
    config = language_config(checkpoint)
    serve = partial(_serve, checkpoint, config, directory, choices)
    served, context = serve(codec), choices.max_context or int(config["max_position_embeddings"])
    model = SameModel(Path(checkpoint), config, "--sglang-url", "SGLang", SAME, receives=shared is None)
    connect = partial(_connect, choices, served, context, model, directory, early)
    link = connect() if shared is None else SharedLink(share(shared, _base_of(checkpoint, served, choices), connect))
    translator = _translator(detokenize, context, config, choices, processor)
    settings = Settings(
        translator,
        served,
        choices.weights_dir or directory / "weights",
        **({} if codec_of is None else {"served_in": lambda precision: serve(codec_of(precision))}),
        model_facts={f.name: f.value for f in model_facts(str(checkpoint))},
        capabilities=_capabilities(translator, choices),
        bucket_bytes=choices.bucket_bytes,
        device="cuda" if choices.device == "cuda" and not choices.url and _sees_a_gpu() else "",
        restarts=Restarts(choices.max_restarts),
        separate_draft=choices.separate_draft and not choices.trains_draft,
        over_http=choices.over_http,
        allow_mismatch=choices.allow_mismatch,
    )
    engine = SglangEngine(link, settings)
    engine.kv_cache_dtype = "" if choices.kv_cache_dtype == "auto" else choices.kv_cache_dtype
    return engine


def _serve(
    checkpoint: str | Path, config: Mapping[str, Any], directory: Path, choices: Choices, codec: Codec
) -> Served:
    check_blocks(config, codec)
    described = layout(checkpoint, codec)
    tied, layers = bool(config.get("tie_word_embeddings")), config.get("num_hidden_layers")
    names = WeightNames("SGLang", described.names, tied, layers, choices.trains_draft)
    arguments = {} if choices.url else _model(checkpoint, described, codec, directory)
    return Served(codec, names, described, {k: v for k, v in arguments.items() if k not in choices.arguments})


def _base_of(checkpoint: str | Path, served: Served, choices: Choices) -> str:
    """Return the key of an SGLang that engines with adapters share.

    Raises:
        ConfigError: SGLang would start without the base, which no update sends.
    """
    if served.described is not None and not served.described.stored:
        raise ConfigError(
            f"--hf-checkpoint {checkpoint} is not stored in the rollout's precision, and SGLang, which receives adapters only, reads the base "
            "from it; convert the checkpoint (miles convert), or send merged weights (--lora-sync merged)"
        )
    return repr((str(checkpoint), choices))


def _connect(
    choices: Choices,
    served: Served,
    context: int,
    model: SameModel,
    directory: Path,
    early: dict[Path, Spawned] | None,
) -> Link:
    """Return the link to running servers, or to a process that starts SGLang."""
    if choices.url:
        return connect_pool(choices, model)
    arguments, environment = _arguments(choices, served.arguments, context), _environment(choices, model.config)
    return ProcessLink(arguments, directory / LOG, choices.startup_timeout, environment, early=early)


def _translator(
    detokenize: Callable[[list[int]], str],
    context: int,
    config: Mapping[str, Any],
    choices: Choices,
    processor: ImageProcessor | None,
) -> Translator:
    return Translator(
        detokenize,
        context,
        int(config["vocab_size"]),
        routing=choices.routing(config),
        supports=not choices.speculative,
        seed=choices.seed if choices.keyed else None,
        versioned=choices.versioned,
        images=None if processor is None else ImageReader.of(processor, config),
    )


def _arguments(choices: Choices, model: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Return the arguments of ``ServerArgs``; the user's arguments override the engine's defaults."""
    shared = {} if choices.share is None else {"mem_fraction_static": choices.share}
    graphs = graph_arguments(choices.arguments, choices.max_running_requests)
    return {
        **_DEFAULTS,
        **(_ON_CPU if choices.device == "cpu" else shared | graphs),
        **model,
        "device": choices.device,
        "dtype": choices.computed_dtype,
        "context_length": context + _CONTEXT_SLACK,
        "max_running_requests": choices.max_running_requests,
        "kv_cache_dtype": choices.kv_cache_name,
        "random_seed": choices.seed,
        "weight_version": "-1",
        **choices.arguments,
        "custom_weight_loader": [*choices.arguments.get("custom_weight_loader", ()), loader.NAME],
    }


def _capabilities(translator: Translator, choices: Choices) -> frozenset[str]:
    """Return the capabilities of the manifest whose conditions hold for these choices."""
    holds = {
        "sampling_support": translator.supports,
        "routed_experts": translator.routing is not None,
        "keyed_sampling": translator.seed is not None,
        "draft": choices.drafts or (choices.separate_draft and choices.versioned),
        "sleep": bool(choices.arguments.get("enable_memory_saver")),
        "rebuild": not choices.url and not choices.arguments.get("enable_memory_saver"),
        "token_versions": translator.versioned,
        **dict.fromkeys((c.name for c in CAPABILITIES), choices.device != "cpu" and not choices.url),
    }
    return frozenset(c.name for c in plugin.list_capabilities("engine") if holds.get(c.name, True))


def _model(checkpoint: str | Path, described: Layout, codec: Codec, directory: Path) -> dict[str, Any]:
    """Return the model arguments: the checkpoint, or a directory with its configuration in the run's number format.

    In the second case SGLang starts with random weights; the first update arrives before the first request.

    Raises:
        ConfigError: the checkpoint is quantised and the rollout precision is BF16.
    """
    waits = _COMPILES if codec.format is not None and compiles(codec.format.name) else {}
    if described.stored:
        return waits | {"model_path": str(checkpoint)}
    if codec.format is None and not described.names:
        raise ConfigError(
            f"--hf-checkpoint {checkpoint} is quantised, but --rollout-precision is bf16: set --rollout-precision to the checkpoint's "
            "number format, or convert the checkpoint first (miles convert --to bf16)"
        )
    model = directory / "model"
    described.write(model)
    return waits | {"model_path": str(model), "load_format": "dummy"}


def _sees_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _experts(config: Mapping[str, Any], choices: Choices) -> int:
    """Return the number of experts if SGLang records routed experts and its schedulers can report their plugin digest; else 0."""
    if choices.routing(config) is None or choices.arguments.get("enable_dp_attention"):
        return 0
    return next(int(fact.value) for fact in config_facts(config) if fact.name == "model.num_experts")


def _schedulers(choices: Choices) -> int:
    """Return the number of schedulers that can import SGLang before it starts them; 0 if SGLang starts them in another way.

    With data-parallel copies another process starts them, and the memory saver needs a library that is loaded before Python.
    """
    given = choices.arguments
    if (given.get("dp_size") or 1) > 1 or given.get("enable_memory_saver"):
        return 0
    return (given.get("tp_size") or 1) * (given.get("pp_size") or 1)


def _environment(choices: Choices, config: Mapping[str, Any]) -> dict[str, str | None]:
    """Return environment variables for SGLang's processes; None removes a variable.

    SGLANG_RETURN_ORIGINAL_LOGPROB is removed because log-probabilities must be those at the sampling temperature.
    """
    experts = _experts(config, choices)
    found: dict[str, str | None] = {
        standby.VARIABLE: str(_schedulers(choices)),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # _CONTEXT_SLACK may exceed the model's limit
        "SGLANG_RETURN_ORIGINAL_LOGPROB": None,
        # the states of convolutions, which SGLang otherwise keeps in BF16 whatever the model's dtype is
        _STATES: os.environ.get(_STATES, choices.computed_dtype),
        _EXACT: "1" if choices.exact else None,
        inside.VARIABLE: "uint8" if 0 < experts <= inside.MOST else inside.WIDE,
    }
    if PRECOMPILES not in os.environ:
        found[PRECOMPILES] = "0"
    if choices.python_path:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (choices.python_path, os.environ.get("PYTHONPATH"))))
    return {**found, "SGLANG_USE_CPU_ENGINE": "1"} if choices.device == "cpu" else found
