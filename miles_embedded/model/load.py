"""Loading a Transformers causal language model so that engine and trainer can run it.

The modules are Transformers' own, and its classes stay as they are. Attention and experts are computed here, through its extension points
(``call``, ``experts``). Some modules get hooks (``temperature``), and some a forward of their own on the instance: linear layers on a CPU
(``onednn``), rotary embeddings that grow (``growing_rope``), and steps for which the model has another operation (``replaced_steps``), as it
has on a GPU (``kernels``). Such
a forward steps aside where a plugin changes the module's class (``own_forward``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from miles_core.errors import CheckpointError, first_line
from miles_core.plugin.detect import config_facts
from miles_embedded.kernels.operations import use_kernels
from miles_embedded.manifest import LAYER_TYPES
from miles_embedded.model.attention_function import attention, no_mask
from miles_embedded.model.call import watch_layers
from miles_embedded.model.configuration import configuration, head, text_configuration
from miles_embedded.model.dequantize import dequantized
from miles_embedded.model.experts import grouped_experts
from miles_embedded.model.growing_rope import follow_rows
from miles_embedded.model.indexer import KNOWN
from miles_embedded.model.joint_linear import join_linear
from miles_embedded.model.onednn import use_fast_linear
from miles_embedded.model.temperature import tune_by_position
from miles_embedded.model.value_head import add_value_head

NAME = "miles"
FLAG = "--hf-checkpoint"
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checkpoint_config(path: str | Path, trust_remote_code: bool = False, flag: str = FLAG) -> Any:
    """The model's configuration; CheckpointError when ``path`` is no checkpoint directory."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{flag} {path}: no such directory; give a local Hugging Face checkpoint")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{flag} {path}: it has no config.json; is this a Hugging Face checkpoint?")
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{flag} {path}: config.json is not valid JSON ({error})") from error
    except Exception as error:  # Transformers checks a configuration in many ways
        raise CheckpointError(f"{flag} {path}: config.json cannot be used ({first_line(error)})") from error


def build_model(run: Any, policy: Any, role: str) -> nn.Module:
    """A model for engine or trainer: from the first active plugin that provides one, else core's; plugins then see it."""
    name = run.hooks.provided("model")[0]
    model: nn.Module = run.hooks.make("model", name, run=run, policy=policy, role=role)
    if role == "critic":
        add_value_head(run, policy, model)
    run.hooks.on("on_model", run=run, policy=policy, model=model, role=role)
    return model


def is_embedded(model: nn.Module) -> bool:
    """Whether a model was loaded for this package's engine and trainer, so that ``active_context`` holds in its layers.
    A backend of another name that runs such a model is meant too."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME


def make_model(run: Any, policy: Any) -> nn.Module:
    """The provider of the model named ``transformers``: the policy's checkpoint, in the run's dtype, on its device."""
    options = run.config_of(policy).model
    device, dtype = resolve_device(options.device), options.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    start, flag = (options.ref_load, "--ref-load") if options.ref_load else (policy.hf_checkpoint, FLAG)
    return load_model(start or options.hf_checkpoint, dtype, device, options.trust_remote_code, flag)


def resolve_device(name: str) -> str:
    """``auto`` becomes ``cuda`` where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    flag: str = FLAG,
) -> nn.Module:
    """Load the causal language model in ``path``.

    Args:
        path: a Hugging Face checkpoint directory with safetensors weights; quantised ones are dequantised.
        dtype: ``auto`` (as stored), ``float32`` or ``bfloat16``.
        device: where the parameters live.
        trust_remote_code: run model code that comes with the checkpoint.
        flag: what named the checkpoint, for messages.

    Returns:
        The model in evaluation mode, attending through a ``Call``.

    Raises:
        CheckpointError: no model can be made of ``config.json``, its weights are not all there in their shapes, or one of them holds
            a number that is not finite. ``examine`` says the same, the last excepted, without reading them.
    """
    config = checkpoint_config(path, trust_remote_code, flag)
    with told(path, flag):
        state = dequantized(path, config, _DTYPES.get(dtype), flag)
        if state is None:
            more = {"trust_remote_code": trust_remote_code, "use_safetensors": True}
            model = filled(kind_of(config), path, config, dtype=_DTYPES.get(dtype, "auto"), **more)
        else:
            made = shell(config, trust_remote_code)
            dtypes = _DTYPES.get(dtype, torch.bfloat16)
            model = filled(type(made), None, configuration(made), dtype=dtypes, state_dict=state)
            if (Path(path) / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(path)
        model = prepare(model.to(device))
        _refuse_nonfinite(model)
    return model


@contextmanager
def told(path: str | Path, flag: str) -> Iterator[None]:
    """What goes wrong while a model is made of the checkpoint ``path``, as a CheckpointError that names it."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith((flag, f"{path}/", f"{path}:")):
            raise
        raise CheckpointError(f"{flag} {path}: {error}") from error
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{flag} {path}: {_said(error)}") from error


def shell(config: Any, trust_remote_code: bool) -> nn.Module:
    """The model of a configuration, without weights (its parameters are on the meta device)."""
    with torch.device("meta"):
        made: nn.Module = kind_of(config).from_config(config, trust_remote_code=trust_remote_code)
    return made


def filled(kind: Any, path: str | Path | None, config: Any, **more: Any) -> Any:
    """A model of the class ``kind`` with the weights of ``path``, or with ``state_dict``.

    Raises:
        CheckpointError: a weight of the model is missing, or has another shape.
    """
    ours = {"attn_implementation": _attention(config), "experts_implementation": NAME, "output_loading_info": True}
    model, info = kind.from_pretrained(path, config=config, ignore_mismatched_sizes=True, **ours, **more)
    if info["mismatched_keys"]:  # which would be initialised at random
        name, there, wanted = min(info["mismatched_keys"])
        count = len(info["mismatched_keys"])
        others = f" ({count} such weights)" if count > 1 else ""
        raise CheckpointError(
            f"{name} is {list(there)} in its weights and {list(wanted)} by its config.json{others}: they are of different models; "
            "copy both again"
        )
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{len(missing)} weights of {type(model).__name__} are missing, first {missing[0]}; copy the checkpoint again"
        )
    return model


def _attention(config: Any) -> str | dict[str, str]:
    """Which attention each part of a model has: ours in the language model; towers are not run, and some of them know Transformers' own
    attentions only."""
    text = config.get_text_config()
    parts = [
        n for n in getattr(config, "sub_configs", None) or {} if isinstance(getattr(config, n, None), PreTrainedConfig)
    ]
    if text is config:
        return NAME
    return {"": NAME} | {name: NAME if getattr(config, name) is text else "eager" for name in parts}


def refuse_config(model: nn.Module) -> None:
    """CheckpointError for what makes a model, with or without weights, and cannot be run: layers that are not computed here, and
    positions that are no numbers."""
    _refuse_unknown_attention(model)
    decoder_layers(model)
    for name, module in model.named_modules():
        if getattr(module, "inv_freq", None) is not None and hasattr(module, "config"):
            made: Any = type(module)(module.config)  # on the meta device there are no numbers to look at
            if not made.inv_freq.isfinite().all():
                rope = getattr(module.config, "rope_parameters", None)
                raise CheckpointError(
                    f"the rotary frequencies of {name} are not finite numbers (rope_parameters in config.json: {rope})"
                )


@torch.no_grad()
def _refuse_nonfinite(model: nn.Module) -> None:
    """CheckpointError for weights that hold NaN or infinity: a run would lose the tokens that meet them, without a word."""
    for name, parameter in model.state_dict(keep_vars=True).items():  # buffers too: a router's correction bias is one
        # one pass without a mask; a sum may overflow where no number does
        if not parameter.is_floating_point() or parameter.sum(dtype=torch.float32).isfinite():
            continue
        if len(where := (~parameter.isfinite()).nonzero()):
            raise CheckpointError(
                f"{name} holds {len(where)} values that are not finite, the first ({parameter[tuple(where[0])].item()}) at "
                f"{where[0].tolist()}; copy the checkpoint again, or repair it"
            )


def _said(error: Exception) -> str:
    """Why Transformers made no model, on one line."""
    first = first_line(error)
    if isinstance(error, (OSError, ValueError, RuntimeError)):
        return f"the weights cannot be loaded ({first})"
    if type(error).__module__.startswith("safetensors"):  # their error's class is not public
        return f"a weight file is damaged or truncated ({first})"
    return f"no model can be made of its config.json ({type(error).__name__}: {first})"


def unloaded_model(config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A causal language model of this configuration with fresh weights, for parts that stand beside a loaded one; not yet prepared."""
    with torch.random.fork_rng(devices=[]):  # the run's own random numbers do not move
        made: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    return made.to(device)


def kind_of(config: Any) -> Any:
    """The auto class of a checkpoint: with the towers of other modalities, where it has them, so that they are exported again."""
    towers = config.get_text_config() is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if towers else AutoModelForCausalLM


def prepare(model: nn.Module) -> nn.Module:
    """Make a freshly built model usable by engine and trainer (once an instance). Only its language model is run, and trained."""
    refuse_config(model)
    if text_configuration(model) is not configuration(model):
        model.requires_grad_(False)
        for part in (backbone(model), head(model)):
            part.requires_grad_(True)
    model.eval()
    watch_layers(backbone(model), decoder_layers(model))
    use_fast_linear(model)
    for module in model.modules():
        tune_by_position(module)
        follow_rows(module)
    use_kernels(model)
    join_linear(model)
    return model


def _refuse_unknown_attention(model: nn.Module) -> None:
    """CheckpointError for layers that would be computed as if each token saw all before it, and should not be."""
    indexer = next(
        (n for n, m in model.named_modules() if type(m).__name__.endswith("Indexer") and type(m).__name__ not in KNOWN),
        None,
    )
    if indexer is not None:
        raise CheckpointError(
            f"{type(model).__name__} chooses the keys of its sparse attention ({indexer}) in a way that the embedded backend "
            "does not know; use another engine and trainer"
        )
    config = text_configuration(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        raise CheckpointError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(kinds))} (layer_types in config.json), which the "
            "embedded backend does not compute; use another engine and trainer"
        )


def backbone(model: nn.Module) -> nn.Module:
    """The decoder stack below ``lm_head``; of a model with towers, that of its language model."""
    found: Any = model
    # Llama 4's text model is named after the one with vision
    names: tuple[str, ...] = (found.base_model_prefix, "model", "language_model")
    while not hasattr(found, "layers"):
        inner = next((x for n in names if isinstance(x := getattr(found, n, None), nn.Module) and x is not found), None)
        if inner is None:
            break
        found, names = inner, ("language_model", "text_model", "model")
    stack: nn.Module = found
    return stack


def has_windows(model: nn.Module) -> bool:
    """Whether a layer may see less than all tokens before it."""
    config = text_configuration(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(getattr(config, "sliding_window", None)) or bool(kinds - {"full_attention"})


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers that the model runs, in order. Layers behind them (``extra_layers``) are not among them."""
    layers = getattr(backbone(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise CheckpointError(
            f"{type(model).__name__} has no list of decoder layers; it cannot be run by the embedded backend"
        )
    run = getattr(text_configuration(model), "num_hidden_layers", None) or len(layers)
    return layers if run >= len(layers) else layers[:run]


def context_limit(model: nn.Module, wanted: int = 0) -> int:
    """The longest sequence that the model is run with: ``wanted``, or what the fact ``model.context`` says where that is 0."""
    stated = facts_of(model)["model.context"]
    return wanted or int(text_configuration(model).max_position_embeddings if stated is None else stated)


def facts_of(model: nn.Module) -> dict[str, Any]:
    """``model.*`` facts of the configuration that the module was built from, by name."""
    return {fact.name: fact.value for fact in config_facts(configuration(model).to_dict())}
