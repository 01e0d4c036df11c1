"""Load Transformers causal language models for engine and trainer.

The modules and classes are Transformers' own. Attention and experts are computed here, through Transformers' extension points
(``call``, ``experts``). Some modules get hooks (``attention_function``), and some a forward on the instance: linear layers on a CPU
(``onednn``) and those on a GPU that read one input (``joint_linear``), length-dependent rotary embeddings (``growing_rope``), and steps
for which the model has another operation (``replaced_steps``), as on a GPU (``kernels``). An instance forward is bypassed when a plugin
changes the module's class (``parts.put_forward``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
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

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.errors import CheckpointError, first_line
from miles_core.plugin.detect import config_facts
from miles_embedded.model.call import watch_layers
from miles_embedded.model.dequantize import dequantize, open_files
from miles_embedded.model.experts import grouped_experts
from miles_embedded.model.finite_weights import refuse_nonfinite
from miles_embedded.model.gpu_operations import use_kernels
from miles_embedded.model.growing_rope import follow_rows
from miles_embedded.model.joint_linear import join_linear
from miles_embedded.model.learned_positions import follow_positions
from miles_embedded.model.onednn import use_fast_linear
from miles_embedded.model.operations import call_attention, make_mask, tune_by_position
from miles_embedded.model.parts import (
    backbone,
    configuration,
    decoder_layers,
    head,
    narrow_input,
    text_configuration,
)
from miles_embedded.model.refusals import refuse_config, refuse_longer
from miles_embedded.model.rotary_entries import complete_rotary
from miles_embedded.model.value_head import is_classifier, refuse_classifier, replace_output
from miles_embedded.model.without_storage import without_storage
from miles_formats.float32 import use_float32_products

if TYPE_CHECKING:
    from miles_formats.convert.decode import QuantizedFiles

#: (model without memory, ``CheckpointFiles`` or ``QuantizedFiles``) -> whether it gave the model weights.
Fill = Callable[[nn.Module, Any], bool]
NAME = "miles"
FLAG = "--hf-checkpoint"
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ALL_ATTENTION_FUNCTIONS.register(NAME, call_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, make_mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checkpoint_config(path: str | Path, trust_remote_code: bool = False, flag: str = FLAG) -> Any:
    """Read the model's configuration; CheckpointError if ``path`` is not a checkpoint directory."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{flag} {path}: no such directory; give a local Hugging Face checkpoint")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{flag} {path}: it has no config.json; is this a Hugging Face checkpoint?")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        complete_rotary(config)
        if getattr(config.get_text_config(), "is_encoder_decoder", False):
            raise CheckpointError(
                "it is an encoder with a decoder (is_encoder_decoder in config.json is true); the embedded backend runs decoders only, as "
                "AutoModelForCausalLM saves them"
            )
        return config
    except CheckpointError as error:
        raise CheckpointError(f"{flag} {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{flag} {path}: config.json is not valid JSON ({error})") from error
    except Exception as error:  # Transformers validates configurations with many exception types
        raise CheckpointError(f"{flag} {path}: config.json cannot be used ({first_line(error)})") from error


def build_model(run: Any, policy: Any, role: str) -> nn.Module:
    """Make a model for engine or trainer with the first plugin that provides one (default ``transformers``), then call ``on_model``."""
    name = run.hooks.find_provided("model")[0]
    model: nn.Module = run.hooks.make("model", name, run=run, policy=policy, role=role)
    if role == "critic":
        replace_output(run, policy, model)
    run.hooks.on("on_model", run=run, policy=policy, model=model, role=role)
    refuse_classifier(model, run.config_of(policy).model.hf_checkpoint)
    return model


def is_embedded(model: nn.Module) -> bool:
    """Whether the model was loaded for this package's engine and trainer, so that ``active_context`` works in its layers.

    This includes models that a backend of another name runs.
    """
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME


def make_model(
    run: Any, policy: Any, fill: Fill | None = None, reduce: Callable[[nn.Module], None] | None = None
) -> nn.Module:
    """Make the model named ``transformers``: the policy's checkpoint, in the run's dtype, on its device. ``fill`` and ``reduce`` as for
    ``load_model``."""
    options = run.config_of(policy).model
    device, dtype = resolve_device(options.device), options.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    start, flag = (options.ref_load, "--ref-load") if options.ref_load else (policy.hf_checkpoint, FLAG)
    towers = run.config.embedded.train_vision_tower
    return load_model(
        start or options.hf_checkpoint, dtype, device, options.trust_remote_code, flag, fill, reduce, towers
    )


def resolve_device(name: str) -> str:
    """Resolve ``auto`` to ``cuda`` if available, else ``cpu``."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    flag: str = FLAG,
    fill: Fill | None = None,
    reduce: Callable[[nn.Module], None] | None = None,
    train_towers: bool = False,
) -> nn.Module:
    """Load the causal language model in ``path``.

    Args:
        path: a Hugging Face checkpoint directory with safetensors weights; quantised weights are dequantised.
        dtype: ``auto`` (as stored), ``float32`` or ``bfloat16``.
        device: device of the parameters.
        trust_remote_code: run model code from the checkpoint.
        flag: flag that named the checkpoint, for messages.
        fill: called with a model whose parameters have no memory yet, and the files of the checkpoint: it gives the parameters values, codes
            (``quantized.encoded.read_weights``) or the memory of another model (``share_weights``), so that the whole model need not be in
            memory. If it returns False, the model is loaded as usual.
        reduce: called with the model on the CPU, before its parameters move to ``device``: it may store them in less memory
            (``encode_weights``).
        train_towers: leave the towers of a multimodal model trainable.

    Returns:
        The model in evaluation mode, attending through a ``Call``.

    Raises:
        CheckpointError: ``config.json`` does not describe a supported model, weights are missing or have other shapes, or a weight
            is not finite. ``examine`` raises the same errors, except the last, without reading the weights.
    """
    use_float32_products()
    config = checkpoint_config(path, trust_remote_code, flag)
    with load_errors(path, flag):
        quantized = open_files(path, config, flag)
        model = None if fill is None else _fill(path, config, dtype, device, trust_remote_code, flag, fill, quantized)
        if model is None:
            model = _read_whole(path, config, dtype, trust_remote_code, flag, quantized)
            if reduce is not None:
                refuse_nonfinite(model)
                reduce(model)
        model = prepare(model.to(device), train_towers)
        if fill is None and reduce is None:
            refuse_nonfinite(model)
    return model


def _read_whole(
    path: str | Path, config: Any, dtype: str, trust_remote_code: bool, flag: str, quantized: QuantizedFiles | None
) -> nn.Module:
    """Load the model to the CPU with Transformers."""
    if quantized is None:
        more = {"trust_remote_code": trust_remote_code, "use_safetensors": True}
        model: nn.Module = fill_model(kind_of(config), path, config, dtype=_DTYPES.get(dtype, "auto"), **more)
        return model
    state = dequantize(quantized, path, _DTYPES.get(dtype), flag)
    made = build_empty(config, trust_remote_code)
    dtypes = _DTYPES.get(dtype, torch.bfloat16)
    model = fill_model(type(made), None, configuration(made), dtype=dtypes, state_dict=state)
    _read_generation_config(model, path)
    return model


def _fill(
    path: str | Path,
    config: Any,
    dtype: str,
    device: str | torch.device,
    trust_remote_code: bool,
    flag: str,
    fill: Fill,
    quantized: QuantizedFiles | None,
) -> nn.Module | None:
    """Make the model without memory and let ``fill`` give it weights; None if ``fill`` cannot."""
    kind = _DTYPES.get(dtype) or getattr(config, "dtype", None) or torch.bfloat16
    ours = {"attn_implementation": attention_by_part(config), "experts_implementation": NAME, "dtype": kind}
    make = partial(kind_of(config).from_config, config, trust_remote_code=trust_remote_code, **ours)
    model = without_storage(make, kind, torch.device(device))
    if not fill(model, quantized or CheckpointFiles(path, flag)):
        return None
    _read_generation_config(model, path)
    return model


def _read_generation_config(model: Any, path: str | Path) -> None:
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)


@contextmanager
def load_errors(path: str | Path, flag: str) -> Iterator[None]:
    """Convert errors while loading the checkpoint ``path`` to CheckpointErrors that name it."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith((flag, f"{path}/", f"{path}:")):
            raise
        raise CheckpointError(f"{flag} {path}: {error}") from error
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{flag} {path}: {_describe_failure(error)}") from error


def build_empty(config: Any, trust_remote_code: bool) -> nn.Module:
    """Make the model of a configuration without weights (parameters on the meta device)."""
    with torch.device("meta"):
        made: nn.Module = kind_of(config).from_config(config, trust_remote_code=trust_remote_code)
    return made


def fill_model(kind: Any, path: str | Path | None, config: Any, **more: Any) -> Any:
    """Make a model of class ``kind`` with the weights of ``path`` or ``state_dict``.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """
    ours = {
        "attn_implementation": attention_by_part(config),
        "experts_implementation": NAME,
        "output_loading_info": True,
    }
    model, info = kind.from_pretrained(path, config=config, ignore_mismatched_sizes=True, **ours, **more)
    if info["mismatched_keys"]:  # Transformers would initialise them randomly
        name, there, wanted = min(info["mismatched_keys"])
        count = len(info["mismatched_keys"])
        others = f" ({count} such weights)" if count > 1 else ""
        raise CheckpointError(
            f"{name} is {list(there)} in its weights and {list(wanted)} by its config.json{others}: the files belong to different "
            "models; copy both again"
        )
    missing = sorted(info["missing_keys"])
    if is_classifier(model):  # it is not stored with an output layer, which ``build_model`` refuses to use
        missing = [name for name in missing if model.get_submodule(name.rpartition(".")[0]) is not head(model)]
    if missing:
        raise CheckpointError(
            f"{len(missing)} weights of {type(model).__name__} are missing, first {missing[0]}; copy the checkpoint again"
        )
    return model


def attention_by_part(config: Any) -> str | dict[str, str]:
    """Return the attention implementation per part: ours for the language model, eager for towers, which may not support other
    implementations."""
    text = config.get_text_config()
    parts = [
        n for n in getattr(config, "sub_configs", None) or {} if isinstance(getattr(config, n, None), PreTrainedConfig)
    ]
    if text is config:
        return NAME
    return {"": NAME} | {name: NAME if getattr(config, name) is text else "eager" for name in parts}


def _describe_failure(error: Exception) -> str:
    """Describe an error of Transformers in one line."""
    first = first_line(error)
    if isinstance(error, (OSError, ValueError, RuntimeError)):
        return f"the weights cannot be loaded ({first})"
    if type(error).__module__.startswith("safetensors"):  # their error's class is not public
        return f"a weight file is damaged or truncated ({first})"
    return f"no model can be made of its config.json ({type(error).__name__}: {first})"


def unloaded_model(config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Make an untrained causal language model of this configuration, for parts outside the loaded model; does not ``prepare`` it."""
    with torch.random.fork_rng(devices=[]):  # leave the run's random state unchanged
        made: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    return made.to(device)


def kind_of(config: Any) -> Any:
    """Return the auto class of a checkpoint. It includes the towers of other modalities, so that an export contains them again.

    Transformers lists some models that read text only (Mistral 4) among those of images and text.
    """
    towers = config.get_text_config() is not config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    listed = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if towers and listed else AutoModelForCausalLM


def prepare(model: nn.Module, train_towers: bool = False) -> nn.Module:
    """Prepare a newly built model for engine and trainer; call once per instance. Only its language model is trained, and with
    ``train_towers`` the rest."""
    refuse_config(model)
    if not train_towers and text_configuration(model) is not configuration(model):
        model.requires_grad_(False)
        for part in (backbone(model), head(model)):
            part.requires_grad_(True)
    model.eval()
    watch_layers(backbone(model), decoder_layers(model))
    use_fast_linear(model)
    if getattr(text_configuration(model), "residual_in_fp32", False):
        narrow_input(head(model))
    for module in model.modules():
        tune_by_position(module)
        follow_rows(module)
    follow_positions(model)
    use_kernels(model)
    join_linear(model)
    return model


def context_limit(model: nn.Module, wanted: int = 0) -> int:
    """Return the longest sequence length: ``wanted``, or the model's limit (fact ``model.context``) if that is 0.

    Raises:
        CheckpointError: the model has a position table with fewer rows.
    """
    stated = facts_of(model)["model.context"]
    limit = wanted or int(text_configuration(model).max_position_embeddings if stated is None else stated)
    refuse_longer(model, limit, "--rollout-max-context-len" if wanted else "config.json")
    return limit


def facts_of(model: nn.Module) -> dict[str, Any]:
    """Return the ``model.*`` facts of the model's configuration, by name."""
    return {fact.name: fact.value for fact in config_facts(configuration(model).to_dict())}
