"""Adapters in peft's file format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from miles_core.plugin import CheckpointError, ConfigError
from miles_lora import LoraOptions
from miles_lora.targets import Target

log = logging.getLogger(__name__)

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FLAG = "--lora-adapter"
_PREFIX = "base_model.model."
#: Entries of peft's configuration for parts that this plugin does not compute: whole trained modules, other scales of some modules, and
#: variants of LoRA that compute something else from the two matrices.
_UNSUPPORTED = (
    *("modules_to_save", "alpha_pattern"),
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "use_qalora"),
)
#: Beginnings of peft's ``init_lora_weights`` that subtract the initial adapter from the base weights, or quantise these
#: (``LoraLayer.update_layer`` in ``peft.tuners.lora.layer``, peft 0.21). With ``gaussian``, ``orthogonal``, ``eva`` and ``mica`` they stay.
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


def names_of(targets: Sequence[Target]) -> dict[str, str]:
    """Return parameter -> beginning of peft's names of its two matrices.

    peft wraps a module with joined experts once per parameter, in their order: the outermost wrapper belongs to the last one.
    """
    joined: dict[str, list[Target]] = {}
    for target in targets:
        if target.is_joined:
            joined.setdefault(target.path, []).append(target)
    found = {}
    for target in targets:
        depth = 0
        if target.is_joined:
            mine = joined[target.path]
            depth = len(mine) - 1 - mine.index(target)
        found[target.source] = f"{_PREFIX}{target.path}.{'base_layer.' * depth}"
    return found


def write_adapter(
    directory: Path,
    targets: Sequence[Target],
    matrices: Mapping[str, tuple[Tensor, Tensor]],
    options: LoraOptions,
    base: str,
    model: nn.Module,
) -> None:
    """Write an adapter that ``peft.PeftModel.from_pretrained`` loads.

    Args:
        directory: made if it does not exist.
        targets: the adapted weights.
        matrices: parameter -> complete A and B.
        options: rank, scale and dropout.
        base: the base model's checkpoint, recorded in the configuration.
        model: the model of the targets.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for source, start in names_of(targets).items():
        for letter, matrix in zip("AB", matrices[source], strict=True):
            tensors[f"{start}lora_{letter}.weight"] = matrix.detach().to("cpu").contiguous()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(adapter_config(targets, options, base, model), indent=2, sort_keys=True)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def adapter_config(targets: Sequence[Target], options: LoraOptions, base: str, model: nn.Module) -> dict[str, Any]:
    """Return peft's configuration of an adapter, as JSON data; arguments as for ``write_adapter``."""
    from peft import LoraConfig  # takes a second to import

    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    modules = _shortest([t.path for t in targets if not t.is_joined], linear)
    parameters = _shortest([t.source for t in targets if t.is_joined], [n for n, _ in model.named_parameters()])
    config: Any = LoraConfig(
        r=options.rank,
        lora_alpha=int(options.alpha) if options.alpha.is_integer() else options.alpha,  # type: ignore[arg-type]
        use_rslora=options.use_rslora,
        lora_dropout=options.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}


def _shortest(chosen: list[str], every: Iterable[str]) -> list[str]:
    """Return ends of names that match ``chosen`` and nothing else among ``every``; the whole names if there are none."""
    wanted, names = set(chosen), list(every)
    for parts in (1, 2):
        ends = list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in chosen))
        if wanted == {name for name in names if any(f".{name}".endswith(f".{end}") for end in ends)}:
            return ends
    return chosen


def read_adapter(
    directory: str, shapes: Mapping[str, tuple[torch.Size, torch.Size]], targets: Sequence[Target]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Read an adapter in peft's format: parameter -> complete A and B.

    Args:
        directory: contains the files.
        shapes: parameter -> shapes of A and B in this run.
        targets: the adapted weights.

    Raises:
        ConfigError: it adapts other weights, or has another rank.
    """
    try:
        tensors = load_file(Path(directory) / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{FLAG} {directory}: {WEIGHTS} cannot be read ({error})") from error
    starts = names_of(targets)
    names = {source: (f"{start}lora_A.weight", f"{start}lora_B.weight") for source, start in starts.items()}
    expected = {name for pair in names.values() for name in pair}
    if tensors.keys() != expected:
        odd = sorted(tensors.keys() ^ expected)[0]
        where = "the file has it and this run adapts no such weight" if odd in tensors else "the file lacks it"
        raise ConfigError(f"{FLAG} {directory}: {odd}: {where}; give the adapter's --lora-target-modules")
    for source, pair in names.items():
        for name, shape in zip(pair, shapes[source], strict=True):
            if tensors[name].shape != shape:
                raise ConfigError(
                    f"{FLAG} {directory}: {name} has shape {list(tensors[name].shape)} where this run needs {list(shape)}; is it of another "
                    "model?"
                )
    return {source: (tensors[a], tensors[b]) for source, (a, b) in names.items()}


def check_adapter(directory: str, options: LoraOptions, base: str) -> None:
    """Check, from its configuration, that training an adapter can continue with these options. Log a warning if it names another base than
    ``base``, because a converted or moved checkpoint has another name, too.

    Raises:
        ConfigError: its rank, scale or kind differs, it belongs to other base weights, or its configuration cannot be read.
    """
    file = Path(directory) / CONFIG
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{FLAG} {directory}: {CONFIG} cannot be read ({error}); give a directory that peft saved"
        ) from error
    if not isinstance(stored, dict):
        raise ConfigError(
            f"{FLAG} {directory}: {CONFIG} holds a {type(stored).__name__} instead of an object; give a directory that peft saved"
        )
    kind = "DORA" if stored.get("use_dora") else stored.get("peft_type")
    extra = next((f" with {entry}" for entry in _UNSUPPORTED if stored.get(entry)), "")
    if kind != "LORA" or extra:
        raise ConfigError(
            f"{FLAG} {directory}: it is an adapter of the kind {kind}{extra}; this plugin trains plain LoRA"
        )
    initial = stored.get("init_lora_weights")
    if str(initial).lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{FLAG} {directory}: its init_lora_weights is {initial}, so it belongs to base weights that peft changed at its start; convert "
            "it to plain LoRA with peft (save_pretrained with path_initial_model_for_weight_conversion), or give the changed weights as "
            f"--hf-checkpoint and set init_lora_weights to true in {file}"
        )
    for key, setting, mine in (
        ("r", f"--lora-rank {options.rank}", options.rank),
        ("lora_alpha", f"--lora-alpha {options.alpha:g}", options.alpha),
        ("use_rslora", "--lora-use-rslora" if options.use_rslora else "--no-lora-use-rslora", options.use_rslora),
    ):
        if stored.get(key, mine) != mine:
            raise ConfigError(
                f"{FLAG} {directory}: its {key} is {stored[key]}, but this run has {setting}; make them equal"
            )
    named = str(stored.get("base_model_name_or_path") or base)
    if Path(named).name != Path(base).name:
        log.warning("%s %s: it was trained over %s, and this run's base is %s", FLAG, directory, named, base)
