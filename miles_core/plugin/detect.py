"""Detect facts of this host and of a checkpoint.

GPUs are queried through NVML, not through ``torch.cuda``, because the driver process must not initialise CUDA before it forks or
places workers. Models are described from their ``config.json``, without importing Transformers.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.errors import CheckpointError, ConfigError
from miles_core.nearest import did_you_mean
from miles_core.plugin.facts import Fact, Facts, State
from miles_core.plugin.layers import LAYERS, layer_kinds, moe_layers
from miles_core.plugin.model_config import EXPERTS, EXPERTS_PER_TOKEN, model_config
from miles_core.plugin.rule import parse_literal

#: GPU -> (compute capability x 10, memory in GB of 1e9 bytes as NVML reports it, so that a plan elsewhere agrees with one on the
#: machine), for ``--fact gpu=NAME``. AMD GPUs have no compute capability (0).
KNOWN_GPUS: dict[str, tuple[int, int]] = {
    "V100": (70, 34),
    "T4": (75, 16),
    "A100": (80, 86),
    "A10": (86, 24),
    "A40": (86, 48),
    "L4": (89, 24),
    "L40S": (89, 48),
    "RTX-4090": (89, 26),
    "H100": (90, 86),
    "H800": (90, 86),
    "H20": (90, 103),
    "H200": (90, 151),
    "GH200": (90, 103),
    "B100": (100, 192),
    "B200": (100, 192),
    "GB200": (100, 199),
    "B300": (103, 270),
    "GB300": (103, 279),
    "RTX-5090": (120, 34),
    "RTX-PRO-6000": (120, 103),
    "MI300A": (0, 128),
    "MI300X": (0, 192),
    "MI325X": (0, 256),
    "MI350X": (0, 288),
    "MI355X": (0, 288),
}
#: Names of GPUs without the letter of their product.
_SHORT = {"MI325": "MI325X", "MI350": "MI350X"}
#: Assumed GPUs per machine if only the total number of GPUs is given.
GPUS_PER_MACHINE = 8
#: ``[[MACHINESx]GPUSx]TYPE``.
_HARDWARE = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?(.+)", re.IGNORECASE)
#: Alias of the fact ``gpu`` for planning, set by ``--hardware``.
HARDWARE = "hardware"
_MEANINGS = {
    "gpu": "name of the GPU, none without one",
    "gpu.sm": "compute capability x 10, 0 without an NVIDIA GPU",
    "gpu.count": "number of GPUs visible to this process",
    "gpu.memory_gb": "memory of the smallest GPU",
    "gpu.machines": "number of machines with such GPUs; known only if given for planning",
}
_MODEL_NAMES = (
    "type",
    "moe",
    "num_experts",
    "top_k",
    "layers",
    "moe_layers",
    "vocab_size",
    "hidden_size",
    "context",
    "mtp_layers",
    "quantized",
)
#: fact -> the keys of config.json that hold it in different model families.
_KEYS: dict[str, tuple[str, ...]] = {
    "type": ("model_type",),
    "num_experts": EXPERTS,
    "top_k": EXPERTS_PER_TOKEN,
    "layers": LAYERS,
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "context": (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "model_max_length",
        "max_target_positions",
    ),
    "mtp_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers"),
}


#: Facts that must be at least 1.
_COUNTS = ("layers", "vocab_size", "hidden_size", "context")
#: Minimum values of integer facts of host and model.
_LEAST = {
    **dict.fromkeys(("gpu.sm", "gpu.count", "gpu.memory_gb"), 0),
    "gpu.machines": 1,
    **{f"model.{name}": 1 for name in _COUNTS},
    **{f"model.{name}": 0 for name in ("num_experts", "top_k", "moe_layers", "mtp_layers")},
}


def gpu_facts() -> list[Fact]:
    """Return the facts ``gpu``, ``gpu.sm``, ``gpu.count`` and ``gpu.memory_gb`` of this host.

    Without an NVIDIA driver or GPU, they are none and 0, so that rules about tensor cores fail on this host with their hint. If
    NVML fails, they are unknown.
    """
    no_driver = _amd() if Path("/dev/kfd").exists() else _no_gpu("detected: no NVIDIA driver")
    if not _has_nvml():
        return no_driver
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return no_driver
    except pynvml.NVMLError as error:
        return _unknown_gpu(f"NVML does not answer: {error}")
    try:
        handles = _visible_handles(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if not handles:
            return _no_gpu("detected: no GPU is visible")
        names = [_text(pynvml.nvmlDeviceGetName(h)) for h in handles]
        sms = [major * 10 + minor for major, minor in map(pynvml.nvmlDeviceGetCudaComputeCapability, handles)]
        memory = min(pynvml.nvmlDeviceGetMemoryInfo(h).total for h in handles)
    except pynvml.NVMLError as error:
        return _unknown_gpu(f"NVML does not answer: {error}")
    finally:
        pynvml.nvmlShutdown()
    weakest = names[sms.index(min(sms))]
    others = f", the weakest of {', '.join(sorted(set(names)))}" if len(set(names)) > 1 else ""
    origin = f"detected: {weakest}{others}"
    return _gpus(short_name(weakest), min(sms), len(handles), round(memory / 1e9), origin)


def _has_nvml() -> bool:
    """Whether NVML can be loaded; True except on Linux. This is faster than importing pynvml, which loads the same library."""
    import ctypes

    try:
        return sys.platform != "linux" or bool(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        return False


def short_name(name: str) -> str:
    """Shorten a GPU name: ``NVIDIA A100-SXM4-80GB`` -> ``A100``. In unknown names, dashes replace spaces."""
    plain = re.sub(r"[\s_]+", "-", re.sub(r"^(NVIDIA|GeForce|Tesla)\s+", "", name.removeprefix("NVIDIA ")).strip())
    parts = plain.upper().split("-")
    for known in sorted(KNOWN_GPUS, key=len, reverse=True):
        wanted = known.upper().split("-")
        if parts[: len(wanted)] == wanted:
            return known
    return plain


def _visible_handles(pynvml: Any, setting: str | None) -> list[Any]:
    """Return handles of the GPUs in ``CUDA_VISIBLE_DEVICES``. Like CUDA, stops at the first invalid entry."""
    everything = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    if setting is None:
        return everything
    handles = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit() and int(entry) < len(everything):
            handles.append(everything[int(entry)])
            continue
        matches = [h for h in everything if entry and _text(pynvml.nvmlDeviceGetUUID(h)).startswith(entry)]
        if not matches:
            break
        handles.append(matches[0])
    return handles


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _gpus(name: str, sm: int, count: int, memory: int, origin: str) -> list[Fact]:
    values = {"gpu": name, "gpu.sm": sm, "gpu.count": count, "gpu.memory_gb": memory}
    return [*(Fact(n, v, origin) for n, v in values.items()), _machines(origin)]


def _machines(origin: str) -> Fact:
    """Return ``gpu.machines`` as unknown, because it is known only after a run has joined the cluster."""
    return Fact("gpu.machines", None, origin, State.UNKNOWN)


def _no_gpu(origin: str) -> list[Fact]:
    return _gpus("none", 0, 0, 0, origin)


def _unknown_gpu(origin: str) -> list[Fact]:
    return [Fact(name, None, origin, State.UNKNOWN) for name in _MEANINGS]


def _amd() -> list[Fact]:
    origin = "detected: an AMD GPU (/dev/kfd), which has no CUDA compute capability"
    known = [Fact("gpu", "AMD", origin), Fact("gpu.sm", 0, origin)]
    unread = ("gpu.count", "gpu.memory_gb", "gpu.machines")
    return known + [Fact(n, None, "not read from AMD drivers", State.UNKNOWN) for n in unread]


def model_facts(checkpoint: str | None) -> list[Fact]:
    """Return the facts of a model from the ``config.json`` of its checkpoint.

    Args:
        checkpoint: a directory, or a hub name. The facts are unknown if the name is not in the local cache.

    Raises:
        CheckpointError: the path does not exist, or the directory has no readable ``config.json``.
    """
    if not checkpoint:
        return _unknown_model("no --hf-checkpoint was given")
    config = model_config(checkpoint)
    if config is None:
        return _unknown_model(f"{checkpoint} is neither a directory nor in the local hub cache")
    try:
        return config_facts(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"--hf-checkpoint {checkpoint}: its config.json cannot be used ({error})") from error


def _unknown_model(why: str) -> list[Fact]:
    return [Fact(f"model.{name}", None, why, State.UNKNOWN) for name in _MODEL_NAMES]


def config_facts(config: Mapping[str, Any]) -> list[Fact]:
    """Return the facts ``model.*`` of a parsed ``config.json`` or of a Transformers configuration as a dictionary.

    With a ``text_config``, the numbers describe the language model. ``model.type`` is the type of the whole checkpoint, because it
    selects the class that loads it.
    """
    inner = language_model(config)
    entries: dict[str, tuple[Any, str]] = {}
    for name, keys in _KEYS.items():
        key = next((k for k in keys if inner.get(k) is not None), None)
        if key and name in _COUNTS and (type(inner[key]) is not int or inner[key] < 1):
            raise ValueError(f"{key} is {inner[key]!r}, and must be a whole number of at least 1")
        entries[name] = (
            (inner[key], f"config.json: {key}={inner[key]}") if key else (None, f"config.json: no {keys[0]}")
        )
    experts, origin = entries["num_experts"]
    experts = int(experts or 0)
    kinds = layer_kinds(inner)
    if kinds and entries["layers"][0] is None:
        entries["layers"] = len(kinds), "config.json: one layer per entry of its list of layers"
    moe = experts > 1 and ("moe" in kinds or "mlp" not in kinds)
    entries["num_experts"] = (experts, origin)
    entries["moe"] = (moe, origin)
    entries["moe_layers"] = (len(moe_layers(inner)), origin) if moe else (0, origin)
    entries["mtp_layers"] = (int(entries["mtp_layers"][0] or 0), entries["mtp_layers"][1])
    entries["context"] = _context(inner, *entries["context"])
    quantisation = config.get("quantization_config") or inner.get("quantization_config") or {}
    method = quantisation.get("quant_method", "yes") if quantisation else "none"
    entries["quantized"] = (method, f"config.json: {'' if quantisation else 'no '}quantization_config")
    facts = []
    for name in _MODEL_NAMES:
        value, origin = entries[name]
        state = State.KNOWN if value is not None else State.NOT_APPLICABLE if name == "top_k" else State.UNKNOWN
        facts.append(Fact(f"model.{name}", value, origin, state))
    return facts


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``text_config`` into the entries of a ``config.json``, but keep the top-level ``model_type``."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return dict(config)
    inner = {**config, **text}
    return inner | ({"model_type": config["model_type"]} if config.get("model_type") else {})


#: Types of rotary embeddings whose frequencies depend on the sequence length.
_GROWING = ("dynamic", "longrope", "su")


def _context(config: Mapping[str, Any], longest: Any, origin: str) -> tuple[Any, str]:
    """Return the maximum length at which all tokens of a sequence have the same rotary frequencies, and its origin.

    Beyond the original limit of ``longrope`` and ``dynamic``, the frequencies change with the sequence length, and engines and trainers
    implement that differently. ``--rollout-max-context-len`` may allow longer sequences.
    """
    given = [config.get("rope_parameters"), config.get("rope_scaling")]
    for rope in [
        item for one in given if isinstance(one, dict) for item in (one, *one.values()) if isinstance(item, dict)
    ]:
        kind = rope.get("rope_type") or rope.get("type")
        limit = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        if kind in _GROWING and limit and (longest is None or limit < longest):
            return limit, f"config.json: {kind} changes its frequencies beyond original_max_position_embeddings={limit}"
    return longest, origin


def override(facts: Facts, given: Sequence[str]) -> Facts:
    """Replace facts to plan for other hardware or another model.

    Args:
        facts: all detected and configured facts.
        given: items ``NAME=VALUE``. ``gpu=B200`` also sets compute capability and memory, ``gpu=8xB200`` the number of GPUs per
            machine, and ``gpu=4x8xB200`` the number of machines. ``hardware`` is an alias of ``gpu``. ``gpu=none`` means no GPU, and
            the value ``unknown`` makes a fact unknown.

    Raises:
        ConfigError: the fact does not exist or is set by an option, or the item is not NAME=VALUE.
    """
    replaced: list[Fact] = []
    for item in given:
        name, sign, word = (part.strip() for part in item.partition("="))
        origin = f"--hardware {word}" if name == HARDWARE else f"--fact {item}"
        if name == HARDWARE:
            name = "gpu"
        if not sign or not word:
            raise ConfigError(f"{origin}: write NAME=VALUE, for example gpu=B200")
        known = facts.lookup(name)
        if name.startswith("plugin."):
            raise ConfigError(f"{origin}: activate plugins with --plugins {name.removeprefix('plugin.')}")
        if known.state is State.NO_SUCH_NAME:
            raise ConfigError(f"{origin}: there is no fact {name!r}; {known.origin or 'miles plan --json lists them'}")
        if known.flag:
            raise ConfigError(f"{origin}: {name} is an option, give {known.flag} {word}")
        if name == "gpu":
            replaced += _parse_gpu(word, origin)
        elif word == "unknown":
            replaced.append(Fact(name, None, origin, State.UNKNOWN, chosen=True))
        else:
            replaced.append(Fact(name, _value(name, word, origin), origin, chosen=True))
    return facts.with_facts(replaced)


def _value(name: str, word: str, origin: str) -> Any:
    """Parse the value of a fact. Raises ConfigError for an invalid value of a host or model fact; facts of plugins accept any value."""
    value = parse_literal(word)
    least = _LEAST.get(name)
    if least is not None and (type(value) is not int or value < least):
        raise ConfigError(f"{origin}: {name} must be a whole number of at least {least}, or unknown")
    if name == "model.moe" and not isinstance(value, bool):
        raise ConfigError(f"{origin}: {name} must be true, false or unknown")
    return value


def _parse_gpu(word: str, origin: str) -> list[Fact]:
    """Return the GPU facts of ``[[MACHINESx]GPUSx]TYPE``."""
    if word == "unknown":
        return [Fact(name, None, origin, State.UNKNOWN, chosen=True) for name in _MEANINGS]
    if word == "none":
        return [Fact(f.name, f.value, origin, f.state, chosen=True) for f in _no_gpu(origin)]
    match = _HARDWARE.fullmatch(word)
    assert match is not None  # the word is not empty
    machines, count = (int(number) if number else None for number in (match[1], match[2]))
    typed = _SHORT.get(match[3].upper(), match[3])
    name = next((known for known in KNOWN_GPUS if known.lower() == typed.lower()), None)
    if name is None:
        hint = did_you_mean(typed.upper(), KNOWN_GPUS) or f"known ones are {', '.join(KNOWN_GPUS)}"
        raise ConfigError(f"{origin}: no GPU of that name is known; {hint} (any other: --fact gpu.sm=N)")
    if machines == 0 or count == 0:
        raise ConfigError(
            f"{origin}: write TYPE, GPUSxTYPE or MACHINESxGPUSxTYPE with numbers of at least 1, for example 8x{name}"
        )
    sm, memory = KNOWN_GPUS[name]
    about = f"{origin}: an AMD GPU has no CUDA compute capability" if not sm else origin
    facts = [Fact("gpu", name, origin, chosen=True), Fact("gpu.sm", sm, about, chosen=True)]
    facts.append(Fact("gpu.memory_gb", memory, origin, chosen=True))
    return [*facts, *_counts(machines, count, origin)]


def _counts(machines: int | None, count: int | None, origin: str) -> list[Fact]:
    """Return ``gpu.count`` and ``gpu.machines``. Without a number of machines, assumes at most ``GPUS_PER_MACHINE`` GPUs per machine."""
    if count is None:
        return [Fact("gpu.count", None, origin, State.UNKNOWN), _machines(origin)]
    if machines is None and count > GPUS_PER_MACHINE:
        if count % GPUS_PER_MACHINE:
            raise ConfigError(
                f"{origin}: {count} GPUs do not fill whole machines of {GPUS_PER_MACHINE}: write MACHINESxGPUSxTYPE, "
                f"for example 2x{GPUS_PER_MACHINE}xH200"
            )
        assumed = f"{origin}, assumed to be machines of {GPUS_PER_MACHINE}"
        return [
            Fact("gpu.count", GPUS_PER_MACHINE, assumed, chosen=True),
            Fact("gpu.machines", count // GPUS_PER_MACHINE, assumed, chosen=True),
        ]
    return [Fact("gpu.count", count, origin, chosen=True), Fact("gpu.machines", machines or 1, origin, chosen=True)]
