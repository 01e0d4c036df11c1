"""Finds the parts of a Transformers model by role, independently of their names in its family, and replaces the forward of a module.

``put_forward`` replaces a forward until the module's class changes: ``on_model`` lets a plugin change the class of a module. An instance
attribute ``forward`` would hide the forward of the new class, because Python looks up instances first. The replacement therefore
compares, at every call, the class's current forward with the original one. ``class_forwards`` suspends replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from miles_core.errors import CheckpointError

#: Names of the list of decoder layers in the decoder stack; BERT's kind has it in a part of the stack.
_LISTS = ("layers", "h", "blocks")
#: Entries of a configuration with the number of decoder layers. For BART's kind ``num_hidden_layers`` counts those of the encoder.
_COUNTS = ("decoder_layers", "num_hidden_layers")
#: Class of a model -> name of its ``logits_module``; empty if that is the output layer.
_LOGITS: dict[type[nn.Module], str] = {}
#: Submodule name of the head.
VALUE_HEAD = "miles_value_head"
#: Attribute that is true if the value head is in place of the output layer.
VALUES_ONLY = "miles_values_only"
#: Attribute of the functions that ``put_forward`` makes.
_REPLACEMENT = "miles_replacement"


def configuration(model: Any) -> Any:
    """Configuration that the model was built from."""
    return model.config


def text_configuration(model: Any) -> Any:
    """Configuration of the language model; of a text-only model its whole configuration."""
    return configuration(model).get_text_config()


def head(model: Any) -> Any:
    """Output layer (``lm_head``), independent of its name in the family."""
    return model.get_output_embeddings()


def logits_module(model: nn.Module) -> nn.Module:
    """Return the module that maps final hidden states to logits: the output layer, or a part of the model with further layers in front of it
    (BERT's kind)."""
    output, kind = head(model), type(model)
    found = _LOGITS.get(kind)
    if found is None:
        around = (
            name
            for name, part in model.named_children()
            if part is not output and output in (inside := set(part.modules())) and backbone(model) not in inside
        )
        found = _LOGITS[kind] = next(around, "")
    return getattr(model, found) if found else output


def backbone(model: nn.Module) -> nn.Module:
    """Return the decoder stack below ``lm_head``; of a multimodal model, that of its language model."""
    found: Any = model
    # Llama 4's text model has the attribute names of the model with vision
    names: tuple[str, ...] = (found.base_model_prefix, "model", "language_model")
    while not hasattr(found, "layers"):
        inner = next((x for n in names if isinstance(x := getattr(found, n, None), nn.Module) and x is not found), None)
        if inner is None:
            break
        found, names = inner, ("language_model", "text_model", "model", "decoder")
    stack: nn.Module = found
    return stack


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers that the model runs, in order, without additional layers (``extra_layers``)."""
    stack = backbone(model)
    places = [(stack, name) for name in _LISTS] + [(getattr(stack, "encoder", None), "layer")]
    layers = next((x for part, name in places if isinstance(x := getattr(part, name, None), nn.ModuleList)), None)
    if layers is None:
        raise CheckpointError(
            f"{type(model).__name__} has no list of decoder layers; it cannot be run by the embedded backend"
        )
    config = text_configuration(model)
    run = next((n for name in _COUNTS if (n := getattr(config, name, None))), len(layers))
    return layers if run >= len(layers) else layers[:run]


def value_head(model: nn.Module) -> nn.Module | None:
    """Return the value head of a critic's model; None for other models."""
    found: nn.Module | None = getattr(model, VALUE_HEAD, None)
    return found


def is_critic(model: nn.Module) -> bool:
    """Whether the model's value head is in place of its output layer."""
    return getattr(model, VALUES_ONLY, False)


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model, shared ones several times. ``nn.Module.modules`` takes ten times as long, because it makes names."""
    found = [model]
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


def put_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make ``forward(module, ...)`` the forward of ``module`` while its class keeps its current forward.

    A subclass that inherits the forward (FSDP2's, a parametrization's) does not disable the replacement.
    """
    replaced = type(module).forward

    def choose(module: Any, *args: Any, **kwargs: Any) -> Any:
        current = type(module).forward
        return (forward if current is replaced else current)(module, *args, **kwargs)

    choose.__dict__[_REPLACEMENT] = True
    module.__dict__["forward"] = MethodType(choose, module)


def narrow_input(layer: Any) -> None:
    """Make a linear layer convert its input to the type of its weight, as Transformers does in front of the output layer."""
    own = layer.forward
    put_forward(layer, lambda module, x: own(x.to(module.weight.dtype)))


@contextmanager
def class_forwards(module: nn.Module) -> Iterator[None]:
    """Suspend the replacements by ``put_forward`` in ``module`` and its submodules, so that the code of their classes runs inside the context.

    Instance forwards of any other origin stay.
    """
    replaced = {m: f for m in module.modules() if getattr(f := m.__dict__.get("forward"), _REPLACEMENT, False)}
    for part in replaced:
        del part.__dict__["forward"]
    try:
        yield
    finally:
        for part, forward in replaced.items():
            part.__dict__["forward"] = forward
