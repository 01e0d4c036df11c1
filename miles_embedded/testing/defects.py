"""Models and engines with small defects, which comparisons of engine and trainer have to detect.

Each defect modifies one instance of a model, or of an engine, after it was built, without changing names or shapes of weights.
``benchmarks/mismatch/planted_defects.py`` and the tests apply them to an engine. ``more_defects`` and ``decode_defects`` have further ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.model.parts import backbone, decoder_layers, text_configuration
from miles_embedded.testing.families import FAMILIES
from miles_testing.tiny import random_checkpoint

#: First position of the late temperature, and of the shifted positions.
_LATE, _SHIFT = 32, 16


#: Standard deviation of the biases of ``checkpoint_of``; those of a newly made model are 0.
_BIASES = 0.5


@dataclass(frozen=True)
class Defect:
    """A defect, and a model that can have it.

    Attributes:
        name: description of the defect.
        family: model family of ``families.FAMILIES``.
        plant: applies the defect to a model, or to an ``EmbeddedEngine`` if ``generating``.
        sizes: configuration entries to override.
        generating: whether only the tokens that an engine generates are wrong.
        options: flags of a run in which the defect has an effect.
    """

    name: str
    family: str
    plant: Callable[[Any], None]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    generating: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def checkpoint(self, directory: Path, **sizes: Any) -> Path:
        """Save a random model that can have the defect, with biases, to ``directory``; ``sizes`` override further entries."""
        import transformers

        name, values = FAMILIES[self.family]
        config = getattr(transformers, name)(**{**values, "max_position_embeddings": 512, **sizes, **self.sizes})
        return random_checkpoint(config, directory, biases=_BIASES)


@contextmanager
def planted(defect: Defect) -> Iterator[None]:
    """Give every ``EmbeddedEngine`` that is made inside this context the defect."""
    make = EmbeddedEngine.__init__

    def make_defective(engine: Any, model: Any, settings: Any) -> None:
        if not defect.generating:
            defect.plant(model)
        make(engine, model, settings)
        if defect.generating:
            defect.plant(engine)

    EmbeddedEngine.__init__ = make_defective  # type: ignore
    try:
        yield
    finally:
        EmbeddedEngine.__init__ = make  # type: ignore[method-assign]


def _untied_head(model: Any) -> None:
    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(torch.randn_like(weight) * weight.std())


def _swapped_gate_and_up(model: Any) -> None:
    mlp: Any = decoder_layers(model)[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))


def _rope_theta(model: Any) -> None:
    rotary: Any = backbone(model).rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq**1.5)  # a theta of 1e6 for 1e4


def _missing_norm(model: Any) -> None:
    layer: Any = decoder_layers(model)[1]
    layer.post_attention_layernorm.forward = lambda x: x


def _stale_layer(model: Any) -> None:
    layer: Any = decoder_layers(model)[1]
    config = text_configuration(model)
    stale = copy.deepcopy(layer, {id(config): config})
    with torch.no_grad():
        for parameter in stale.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    layer.forward = stale.forward


def _attention_scale(model: Any) -> None:
    attention: Any = decoder_layers(model)[0].self_attn
    attention.scaling *= 1.25


def _ignored_window(model: Any) -> None:
    wide = 1 << 20
    text_configuration(model).sliding_window = wide
    for layer in decoder_layers(model):
        attention: Any = layer.self_attn
        if getattr(attention, "sliding_window", None):
            attention.sliding_window = wide


def _activation(model: Any) -> None:
    mlp: Any = decoder_layers(model)[0].mlp
    mlp.act_fn = nn.GELU()


def _late_temperature(model: Any) -> None:
    change_rotation(model, lambda part, positions: part * (1 + 0.2 * (positions >= _LATE))[..., None].to(part))


def _logit_scale(model: Any) -> None:
    norm: Any = backbone(model).norm
    norm.register_forward_hook(lambda module, args, output: output * 0.97)


def _swapped_expert(model: Any) -> None:
    layer: Any = decoder_layers(model)[0]
    experts = layer.mlp.experts

    def swap(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, index, *more = args
        swapped = torch.where(index < 2, 1 - index, index)
        return hidden, swapped, *more

    experts.register_forward_pre_hook(swap)


def _shifted_positions(model: Any) -> None:
    rotary: Any = backbone(model).rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids + (position_ids >= _SHIFT))


def change_rotation(model: Any, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change cosines and sines [sequences, tokens, dim], given the positions [sequences, tokens]."""
    rotary: Any = backbone(model).rotary_emb
    forward = rotary.forward

    def changed(x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(change(each, position_ids) for each in forward(x, position_ids))

    rotary.forward = changed


WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

#: All defects, in the order of the page that lists them.
DEFECTS = (
    Defect("untied head", "qwen3_moe", _untied_head, {"tie_word_embeddings": True}),
    Defect("swapped gate and up", "qwen3", _swapped_gate_and_up),
    Defect("wrong rope theta", "qwen3", _rope_theta),
    Defect("missing norm", "qwen3_moe", _missing_norm),
    Defect("one stale layer", "qwen3_moe", _stale_layer),
    Defect("wrong attention scale", "qwen3", _attention_scale),
    Defect("ignored window", "qwen3", _ignored_window, WINDOW),
    Defect("wrong activation", "qwen3", _activation),
    Defect("late temperature", "qwen3", _late_temperature),
    Defect("logit scale .97", "qwen3", _logit_scale),
    Defect("one expert swapped", "qwen3_moe", _swapped_expert),
    Defect("shifted positions", "llama", _shifted_positions),
)
