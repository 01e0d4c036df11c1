"""Selects the weights to which a number format applies.

A number format applies to the matrices of linear layers and experts. Norms, embeddings, ``lm_head``, routers, biases,
1-D tensors, MTP's ``eh_proj``, Mamba's ``dt_proj`` and the towers of other modalities always keep their precision; users can
exclude more with selectors and layer ranges. Selectors match Hugging Face parameter names: one with a ``*`` is a glob for the whole
name, any other is a substring, and ``_`` is ignored (``layer_norm`` matches ``input_layernorm``). Engine and trainer use the same
selector, so both exclude the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from miles_core.errors import ConfigError
from miles_core.nearest import find_nearest

Shape = tuple[int, ...]

#: Tensors that always keep their precision. If the whole model is known, routers are identified by shape (``experts``). By name, a router
#: contains ``router`` (``router.layer``, ``modality_router``) or is a module ``gate``; the latter is a glob, because as a substring it
#: would match every ``gate_proj``. ``altup`` predicts and mixes residual streams with matrices of a few numbers.
#: ``shared_head`` is the ``lm_head`` of an MTP layer; ``weights_proj`` of the sparse-attention indexer is BF16 in engines.
#: Mamba's code multiplies by the weight of ``dt_proj`` without calling the linear layer.
NEVER = (
    "norm",
    "embed",
    "lm_head",
    "shared_head",
    "router",
    "altup",
    "*.gate.*",
    "*.shared_expert_gate.weight",
    "*.indexer.weights_proj.weight",
    "eh_proj",
    "*.dt_proj.weight",
)

#: Modules of other modalities and their connectors to the language model: matched in names outside the decoder's layers.
_TOWER = re.compile(
    r"(?:^|\.)("
    r"(?:vision|visual|image|video|audio|speech)"
    r"(?:_(?:tower|model|encoder|backbone|transformer|tokenizer|language_adapter|adapter|projector|projection(?:_layer)?|resampler))?"
    r"|(?:multi_modal|multimodal|mm|vit_large)_projector|projector|connector|aligner|resampler|patch_merger|mlp1|vpm|apm"
    r"|sam_model|talker|token2wav|code2wav|tts"
    r")\."
)

#: Common selectors that may match nothing without an error (tied embeddings, names of other families).
_HABITS = ("lmhead", "embed", "layernorm")


#: Matches the index of a decoder layer; layers in towers of other modalities have longer paths.
_LAYER = re.compile(r"(?:(?:model|backbone)\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


#: One expert's tensors, and those of all experts of a block.
_EXPERT = re.compile(r"(.*)\.experts\.(?:(\d+)\.|[^.]+(?:\.weight)?\Z)")


@dataclass(frozen=True)
class Exclusion:
    """Weights that the user excludes, by selectors or by decoder layers.

    Attributes:
        origin: the flag that set the exclusion, for messages.
        selectors: selectors in the syntax of this module.
        layers: indexes of decoder layers, from 0.
    """

    origin: str
    selectors: tuple[str, ...] = ()
    layers: range = range(0)

    def __post_init__(self) -> None:
        if not all(s.strip() for s in self.selectors):
            raise ConfigError(f"{self.origin} has an empty entry, which would match every tensor")

    def finds(self, name: str) -> str | None:
        """Return the selector or layer range that matches the parameter ``name``; None if none does."""
        if self.layers and (layer := _LAYER.match(name)) and int(layer[1]) in self.layers:
            return f"layer {layer[1]}"
        return next((s for s in self.selectors if matches(s, name)), None)

    def __str__(self) -> str:
        layers = [f"layers {self.layers.start} to {self.layers.stop - 1}"] if self.layers else []
        return f"{self.origin}: {','.join([*self.selectors, *layers]) or 'empty'}"


def matches(selector: str, name: str) -> bool:
    """Return whether a selector matches the parameter ``name``."""
    if "*" in selector:
        return fnmatchcase(name, selector)
    return selector.replace("_", "") in name.replace("_", "")


@lru_cache(1 << 16)  # called for every tensor at every sync
def _never(name: str) -> str | None:
    """Return the rule in ``NEVER`` that matches a parameter's name; None if none does."""
    return next((rule for rule in NEVER if matches(rule, name)), None)


@lru_cache(1 << 16)
def tower(name: str) -> str | None:
    """Return the module of another modality (``visual``, ``multi_modal_projector``, ...) that contains a parameter; None for the
    language model."""
    found = None if _LAYER.match(name) else _TOWER.search(name)
    return found[1] if found else None


def routers(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Return the names of the matrices of a whole checkpoint that score experts, regardless of their names: they are next to the experts
    of a block, in a module whose matrices have one row per expert."""
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        found = _EXPERT.match(name)
        if found and found[2]:
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
        elif found and len(shape) == 3:
            counts[found[1]] = shape[0]
        elif is_stacked(name, shape):
            counts[name.removesuffix(".weight").rpartition(".")[0]] = shape[0]
    beside: dict[tuple[str, str], list[str]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        for at in range(1, len(parts) - 1) if len(shape) == 2 else ():
            block = ".".join(parts[:at])
            if block in counts and parts[at] != "experts":
                beside.setdefault((block, parts[at]), []).append(name)
    return frozenset(
        name
        for (block, _), names in beside.items()
        if all(shapes[name][0] == counts[block] for name in names)
        for name in names
    )


def is_stacked(name: str, shape: Shape) -> bool:
    """Return whether a tensor holds matrices of several experts under an unknown name; convolution kernels with one input channel do
    not count."""
    return (
        len(shape) == 3 and shape[1] > 1 and "experts" not in name and name.endswith(".weight") and tower(name) is None
    )


class Selector:
    """Decides for every checkpoint tensor whether the run's number format applies.

    Args:
        skip: the user's selectors of excluded weights.
        origin: the flag that set ``skip``, for messages.
        only: selectors of the weights to which the format applies; empty for every matrix.
        only_origin: reason for the limit ``only``, for messages.
        exclusions: further exclusions, from other flags.
    """

    def __init__(
        self,
        skip: Iterable[str] = (),
        origin: str = "the list of weights to leave alone",
        only: Iterable[str] = (),
        only_origin: str = "the weights the format is for",
        exclusions: Iterable[Exclusion] = (),
    ) -> None:
        self.skip = tuple(skip)
        self.origin = origin
        self.only = tuple(only)
        self.only_origin = only_origin
        self.exclusions = (Exclusion(origin, self.skip), *exclusions)
        #: names of the matrices that score experts, if the whole model is known
        self.routers: frozenset[str] = frozenset()

    def settle(self, shapes: Mapping[str, Shape]) -> None:
        """Identify the routers of a model from all tensors of its checkpoint."""
        self.routers = routers(shapes)

    def __call__(self, name: str, shape: Shape) -> bool:
        """Return whether this tensor is quantised."""
        return self.reason(name, shape) is None

    def reason(self, name: str, shape: Shape) -> str | None:
        """Return the reason why the tensor keeps its precision; None if it is quantised.

        Raises:
            ConfigError: the tensor holds several experts and the codec did not split it.
        """
        left_alone = self._left_alone(name, shape)
        if left_alone is None and len(shape) > 2:
            raise ConfigError(
                f"{name} {list(shape)} holds all experts of a layer, and each expert is quantised apart: use bf16, or "
                f"leave them alone with {self.origin}"
            )
        return left_alone

    def spares(self, name: str, shape: Shape) -> bool:
        """Return whether the tensor, a matrix or several experts, keeps its precision under its current name."""
        return self._left_alone(name, shape) is not None

    def _left_alone(self, name: str, shape: Shape) -> str | None:
        left_alone = self._always(name, shape)
        if left_alone is None and not self._wanted(name):
            left_alone = f"{self.only_origin}: not among {', '.join(self.only)}"
        if left_alone is None:
            left_alone = next((f"{k.origin}: {found}" for k in self.exclusions if (found := k.finds(name))), None)
        return left_alone

    def eligible(self, name: str, shape: Shape) -> bool:
        """Return whether the format would apply without the user's exclusions."""
        return self._always(name, shape) is None and self._wanted(name)

    def _wanted(self, name: str) -> bool:
        return not self.only or any(matches(s, name) for s in self.only)

    def _always(self, name: str, shape: Shape) -> str | None:
        """Return the reason why this tensor is never quantised; None if it may be quantised."""
        if (other := tower(name)) is not None:
            return f"never quantised: {other} is not of the language model"
        rule = _never(name)
        if rule is not None:
            return f"never quantised: {rule}"
        if name in self.routers:
            return "never quantised: it scores experts"
        fused = len(shape) > 2 and "experts" in name
        if not fused and (len(shape) != 2 or not name.endswith(".weight")):
            return "not the matrix of a linear layer"
        return None

    def check(self, shapes: Mapping[str, Shape]) -> list[str]:
        """Compare the user's selectors with every tensor of a checkpoint.

        Returns:
            Notes about selectors that change nothing.

        Raises:
            ConfigError: a selector matches no tensor; names the nearest.
        """
        notes = []
        joined = [name for name, shape in shapes.items() if is_stacked(name, shape)]
        if joined:
            notes.append(
                f"{len(joined)} tensors hold the experts of a layer in a layout that is not supported, and keep their precision; "
                f"the first is {joined[0]} {list(shapes[joined[0]])}"
            )
        for origin, selector in [(k.origin, s) for k in self.exclusions for s in k.selectors]:
            found = [name for name in shapes if matches(selector, name)]
            if found and not any(self.eligible(name, shapes[name]) for name in found):
                notes.append(f"{origin}: {selector!r} changes nothing, what it matches is not quantised anyway")
            elif not found and selector.replace("_", "") in _HABITS:
                notes.append(f"{origin}: {selector!r} matches no tensor of this model")
            elif not found:
                raise ConfigError(
                    f"{origin}: {selector!r} matches none of the model's {len(shapes)} tensors"
                    f"{_nearest(selector, shapes)}; a selector is part of a name, or a glob with * for all of it"
                )
        if self.only and not any(self.eligible(name, shape) for name, shape in shapes.items()):
            raise ConfigError(
                f"{self.only_origin}: none of the model's {len(shapes)} tensors is among {', '.join(self.only)}, so "
                "there is nothing to quantise; use bf16 instead"
            )
        if not any(self(name, shape) for name, shape in shapes.items()):
            given = "; ".join(str(k) for k in self.exclusions if k.selectors or k.layers) or str(self.exclusions[0])
            raise ConfigError(
                f"{given} leaves nothing to quantise among the model's {len(shapes)} tensors; use bf16 instead"
            )
        return notes


def _nearest(selector: str, names: Iterable[str]) -> str:
    """Return ``; nearest: a, b`` with the closest whole names or name parts; "" if none is similar."""
    wanted = selector.replace("*", "").strip(".")
    pieces = {piece for name in names for piece in (name, *name.split(".")) if not piece.isdigit()}
    close = find_nearest(wanted, sorted(pieces))
    return f"; nearest: {', '.join(close)}" if close else ""
