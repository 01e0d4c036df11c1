"""The engine from a run's configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.format import Codec, make_codec
from miles_core.plugin import CheckpointError, ConfigError, config_facts, model_facts, moe_layers
from miles_runtime import Restarts
from miles_sglang import HEADS, inside, loader, plugin
from miles_sglang.config import given_arguments
from miles_sglang.engine import IN_PLACE, SglangEngine
from miles_sglang.link import Link
from miles_sglang.process import ProcessLink
from miles_sglang.responses import Routing, Translator
from miles_sglang.server import ServerLink
from miles_sglang.settings import Settings
from miles_sglang.shapes import check_blocks
from miles_sglang.weight_names import WeightNames
from miles_tools.convert import Layout, layout

#: Set unless a user says otherwise: no grammar is used; on a CPU, what SGLang can compute there.
_DEFAULTS: dict[str, Any] = {"grammar_backend": "none", "log_level": "info"}
_ON_CPU: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
}
#: The trainer of this run lives on the same GPU, so SGLang may not take its usual nine tenths.
_BESIDE_A_TRAINER: dict[str, Any] = {"mem_fraction_static": 0.4}
#: SGLang ends a scheduler whose forward takes longer than 300 s. It compiles the kernels of formats that it packs in the first one, which
#: takes longer than that.
_COMPILES: dict[str, Any] = {"watchdog_timeout": 3600.0}
#: SGLang ends a sequence this much before its ``context_length``.
_CONTEXT_SLACK = 8


#: The column of the experts that an engine chose, as the plugin that replays them declares it.
ROUTED_EXPERTS = "rollout_routed_experts"
#: Whether SGLang compiles its FP8 kernels for all of 16,384 sizes before its first answer, a few of them a second. A rollout needs few of
#: them: these are compiled when they are needed, and kept on disk.
PRECOMPILES = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How SGLang is to be started; where nothing else is said, as the option of the same name says.

    Attributes:
        arguments: of SGLang's ``ServerArgs``, as a user gave them.
        device: ``cuda`` or ``cpu``.
        max_context: 0 is the model's.
        routed_dtype: of the column of routed experts.
        url: of a server that runs already; how SGLang is started is then the server's business.
        bucket_bytes: at most, of weights that travel together.
        max_restarts: how often SGLang is started again when it died.
        beside_trainer: the trainer computes on the same GPU, and keeps its memory.
        allow_mismatch: go on where an update does not reach all of SGLang's parameters.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cuda"
    dtype: str = "auto"
    seed: int = 0
    max_context: int = 0
    max_running_requests: int = 256
    kv_cache_dtype: str = "auto"
    routed_dtype: str = "int32"
    url: str | None = None
    weights_dir: Path | None = None
    startup_timeout: float = 900.0
    bucket_bytes: int = 512 << 20
    max_restarts: int = 0
    beside_trainer: bool = True
    allow_mismatch: bool = False

    @property
    def speculative(self) -> bool:
        """Whether a draft proposes tokens."""
        return bool(self.arguments.get("speculative_algorithm"))

    @property
    def drafts(self) -> bool:
        """Whether the draft is a layer of the checkpoint itself, whose weights come with the others."""
        return self.speculative and self.arguments["speculative_algorithm"] in HEADS and not self.separate_draft

    @property
    def separate_draft(self) -> bool:
        """Whether the draft is a model of its own, which no sync changes."""
        return bool(self.arguments.get("speculative_draft_model_path"))

    @property
    def keyed(self) -> bool:
        """Whether a request's seed decides its tokens."""
        return bool(self.arguments.get("enable_deterministic_inference")) and not self.speculative


def make_engine(run: Any, policy: Any) -> SglangEngine:
    """The provider of ``--engine sglang``."""
    config, tokenizer = run.config_of(policy), run.tokenizer
    options = config.plugin(plugin.name)
    routed = next((f for f in run.fields if f.name == ROUTED_EXPERTS), None)
    device = _device(config.model.device)
    choices = Choices(
        arguments={**_tensor_parallel(config, device), **given_arguments(options)},
        device=device,
        dtype=config.model.dtype,
        seed=config.train.seed,
        max_context=config.rollout.max_context_len or 0,
        max_running_requests=config.rollout.max_running_requests,
        kv_cache_dtype=config.rollout.kv_cache_dtype,
        routed_dtype=routed.dtype if routed else "int32",
        url=options.url,
        weights_dir=Path(options.weights_dir) if options.weights_dir else None,
        startup_timeout=options.startup_timeout,
        bucket_bytes=config.run.sync_bucket_size,
        max_restarts=config.run.max_restarts,
        beside_trainer=config.run.runtime == "inline" and not config.run.colocate,
        allow_mismatch=config.run.allow_mismatch,
    )

    def detokenize(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return assemble(policy.hf_checkpoint, make_codec(run, policy), detokenize, run.directory / "sglang", choices)


def _tensor_parallel(config: Any, device: str) -> dict[str, int]:
    """``tp_size`` where a runtime gives an engine several GPUs: all of them, among the pipeline stages that were asked for."""
    if config.run.runtime != "ray" or device != "cuda":
        return {}
    stages = config.plugin(plugin.name).pp_size or 1
    return {"tp_size": max(config.plugin("ray").rollout_num_gpus_per_engine // stages, 1)}


def assemble(
    checkpoint: str | Path, codec: Codec, detokenize: Callable[[list[int]], str], directory: Path, choices: Choices
) -> SglangEngine:
    """An engine for a checkpoint, not yet started.

    Args:
        codec: of the weights it will be given.
        detokenize: token ids to text without special tokens.
        directory: of its log and of what it is started from.
    """
    described, config = layout(checkpoint, codec), _text_config(Path(checkpoint))
    check_blocks(config, codec)
    context = choices.max_context or int(config["max_position_embeddings"])
    link: Link
    if choices.url:
        link = ServerLink(choices.url, choices.startup_timeout, choices.arguments)
    else:
        model = _model(checkpoint, described, codec, directory)
        if codec.format is not None and codec.format.name not in IN_PLACE:
            model = _COMPILES | model
        arguments = _arguments(choices, model, context)
        environment = _environment(choices.device, _experts(config, choices))
        link = ProcessLink(arguments, directory / "sglang.log", choices.startup_timeout, environment)
    translator = Translator(
        detokenize,
        context,
        int(config["vocab_size"]),
        routing=_routing(config, choices),
        supports=not choices.speculative,
        seed=choices.seed if choices.keyed else None,
    )
    settings = Settings(
        translator,
        codec,
        WeightNames(described.names, bool(config.get("tie_word_embeddings")), config.get("num_hidden_layers")),
        choices.weights_dir or directory / "weights",
        described=described,
        model_facts={f.name: f.value for f in model_facts(str(checkpoint))},
        capabilities=_capabilities(translator, choices),
        bucket_bytes=choices.bucket_bytes,
        device="cuda" if choices.device == "cuda" and not choices.url and _sees_a_gpu() else "",
        restarts=Restarts(choices.max_restarts),
        separate_draft=choices.separate_draft,
        allow_mismatch=choices.allow_mismatch,
    )
    engine = SglangEngine(link, settings)
    engine.kv_cache_dtype = "" if choices.kv_cache_dtype == "auto" else choices.kv_cache_dtype
    return engine


def _arguments(choices: Choices, model: Mapping[str, Any], context: int) -> dict[str, Any]:
    """``ServerArgs``: what this engine needs, then what a user gave."""
    return {
        **_DEFAULTS,
        **(_ON_CPU if choices.device == "cpu" else _BESIDE_A_TRAINER if choices.beside_trainer else {}),
        **model,
        "device": choices.device,
        "dtype": _dtype(choices.dtype, choices.device),
        "context_length": context + _CONTEXT_SLACK,
        "max_running_requests": choices.max_running_requests,
        "kv_cache_dtype": _KV_CACHE.get(choices.kv_cache_dtype, choices.kv_cache_dtype),
        "random_seed": choices.seed,
        "weight_version": "-1",
        **choices.arguments,
        "custom_weight_loader": [*choices.arguments.get("custom_weight_loader", ()), loader.NAME],
    }


def _capabilities(translator: Translator, choices: Choices) -> frozenset[str]:
    """What the manifest declares, as far as its conditions hold here."""
    holds = {
        "sampling_support": translator.supports,
        "routed_experts": translator.routing is not None,
        "keyed_sampling": translator.seed is not None,
        "draft": choices.drafts,
        "sleep": bool(choices.arguments.get("enable_memory_saver")),
    }
    return frozenset(c.name for c in plugin.declared("engine") if holds.get(c.name, True))


#: Core's names of cache types -> SGLang's.
_KV_CACHE = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def _model(checkpoint: str | Path, described: Layout, codec: Codec, directory: Path) -> dict[str, Any]:
    """What SGLang is started from: the checkpoint, or its configuration in the run's number format. Weights are random
    then until the first update, which comes before the first request."""
    if described.stored:
        return {"model_path": str(checkpoint)}
    if codec.format is None and not described.names:
        raise ConfigError(
            f"--hf-checkpoint {checkpoint} is quantised and SGLang is to serve bf16: give the number format it is in as "
            "--rollout-precision, or convert it first (miles convert --to bf16)"
        )
    model = directory / "model"
    described.write(model)
    return {"model_path": str(model), "load_format": "dummy"}


def _text_config(checkpoint: Path) -> dict[str, Any]:
    """The keys of the language model in ``config.json``."""
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--hf-checkpoint {checkpoint}: its config.json cannot be read ({error})") from error
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _routing(config: Mapping[str, Any], choices: Choices) -> Routing | None:
    if not choices.arguments.get("enable_return_routed_experts"):
        return None
    facts = {f.name: f.value for f in config_facts(config)}
    layers = moe_layers(config)
    if not layers:
        return None
    return Routing(ROUTED_EXPERTS, choices.routed_dtype, int(facts["model.layers"]), layers, int(facts["model.top_k"]))


def _device(asked: str) -> str:
    return asked if asked != "auto" else "cuda" if _sees_a_gpu() else "cpu"


def _sees_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _dtype(asked: str, device: str) -> str:
    if asked != "auto":
        return asked
    return "float32" if device == "cpu" else "bfloat16"


def _experts(config: Mapping[str, Any], choices: Choices) -> int:
    """Of the model, where SGLang records which ones it routes to, in a scheduler that can be asked what it loaded; else 0."""
    if _routing(config, choices) is None or choices.arguments.get("enable_dp_attention"):
        return 0
    return next(int(fact.value) for fact in config_facts(config) if fact.name == "model.num_experts")


def _environment(device: str, experts: int) -> dict[str, str | None]:
    """Variables that SGLang, and what runs inside it, read. Its log-probabilities must be those at the sampling temperature."""
    found: dict[str, str | None] = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the slack above the model's own limit
        "SGLANG_RETURN_ORIGINAL_LOGPROB": None,
        inside.VARIABLE: "uint8" if 0 < experts <= inside.MOST else inside.WIDE,
    }
    if PRECOMPILES not in os.environ:
        found[PRECOMPILES] = "0"
    return {**found, "SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else found
