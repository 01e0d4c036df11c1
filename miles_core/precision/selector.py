"""Which weights a number format applies to.

A number format applies to the matrices of linear layers and experts. Norms, embeddings, ``lm_head``, routers, biases,
1-D tensors, MTP's ``eh_proj`` and the towers of other modalities always keep their precision; a run adds selectors and
layer ranges of its own. One dialect, over Hugging Face parameter names: a selector with a ``*`` is a glob for the whole
name, any other is a substring, and ``_`` does not count (``layer_norm`` finds ``input_layernorm``). Engine and trainer
ask the same selector, so both leave the same weights alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from miles_core.errors import ConfigError
from miles_core.nearest import nearest

Shape = tuple[int, ...]

#: What always keeps its precision. Routers are found by what they are where the whole model is known (``routers``); by name, one is
#: called ``router`` with whatever under it (``router.layer``, ``modality_router``), or is a module ``gate``: a glob, because as a
#: substring that would find every ``gate_proj``. ``altup`` predicts and mixes residual streams with matrices of a few numbers.
#: ``shared_head`` is the ``lm_head`` of an MTP layer; ``weights_proj`` of the sparse-attention indexer is BF16 in engines.
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
)

#: Module of another modality, or what joins it to the language model: a part of a name outside of the decoder's layers.
_TOWER = re.compile(
    r"(?:^|\.)("
    r"(?:vision|visual|image|video|audio|speech)"
    r"(?:_(?:tower|model|encoder|backbone|transformer|tokenizer|language_adapter|adapter|projector|projection(?:_layer)?|resampler))?"
    r"|(?:multi_modal|multimodal|mm|vit_large)_projector|projector|connector|aligner|resampler|patch_merger|mlp1|vpm|apm"
    r"|sam_model|talker|token2wav|code2wav|tts"
    r")\."
)

#: Selectors people give by habit, which may match nothing (tied embeddings, another family's names).
_HABITS = ("lmhead", "embed", "layernorm")


#: The number of a decoder layer; towers of other modalities have layers of their own, with a longer path.
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


#: One expert's tensors, and those of all experts of a block.
_EXPERT = re.compile(r"(.*)\.experts\.(?:(\d+)\.|[^.]+(?:\.weight)?\Z)")


@dataclass(frozen=True)
class Exclusion:
    """Weights the user wants left alone: those that selectors find, or those of some decoder layers.

    Attributes:
        origin: the flag it came from, for messages.
        selectors: in the dialect of this module.
        layers: numbers of decoder layers, counted from 0.
    """

    origin: str
    selectors: tuple[str, ...] = ()
    layers: range = range(0)

    def __post_init__(self) -> None:
        if not all(s.strip() for s in self.selectors):
            raise ConfigError(f"{self.origin} has an empty entry, which would match every tensor")

    def finds(self, name: str) -> str | None:
        """What in it finds the parameter ``name``; None when nothing does."""
        if self.layers and (layer := _LAYER.match(name)) and int(layer[1]) in self.layers:
            return f"layer {layer[1]}"
        return next((s for s in self.selectors if matches(s, name)), None)

    def __str__(self) -> str:
        layers = [f"layers {self.layers.start} to {self.layers.stop - 1}"] if self.layers else []
        return f"{self.origin}: {','.join([*self.selectors, *layers]) or 'empty'}"


def matches(selector: str, name: str) -> bool:
    """Whether a selector finds the parameter ``name``."""
    if "*" in selector:
        return fnmatchcase(name, selector)
    return selector.replace("_", "") in name.replace("_", "")


@lru_cache(1 << 16)  # asked for every tensor at every sync
def _never(name: str) -> str | None:
    """The rule by which no run quantises a parameter of this name."""
    return next((rule for rule in NEVER if matches(rule, name)), None)


@lru_cache(1 << 16)
def tower(name: str) -> str | None:
    """The module of another modality (``visual``, ``multi_modal_projector``, ...) that a parameter belongs to."""
    found = None if _LAYER.match(name) else _TOWER.search(name)
    return found[1] if found else None


def routers(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """The matrices of a whole checkpoint that score experts, whatever they are called: beside the experts of a block, in a module
    whose matrices have one row an expert."""
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        found = _EXPERT.match(name)
        if found and found[2]:
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
        elif found and len(shape) == 3:
            counts[found[1]] = shape[0]
        elif stacked(name, shape):
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


def stacked(name: str, shape: Shape) -> bool:
    """Whether a tensor holds matrices of several experts under a name that does not say so; a convolution's kernels of one input
    channel are none."""
    return (
        len(shape) == 3 and shape[1] > 1 and "experts" not in name and name.endswith(".weight") and tower(name) is None
    )


class Selector:
    """Decides for every checkpoint tensor whether the run's number format applies.

    Args:
        skip: the user's selectors of weights to leave alone.
        origin: the flag they came from, for messages.
        only: selectors of what the format is for; empty is every matrix.
        only_origin: what limits it to ``only``, for messages.
        exclusions: more that is left alone, from other flags.
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
        #: the matrices that score experts, where the whole model is known
        self.routers: frozenset[str] = frozenset()

    def settle(self, shapes: Mapping[str, Shape]) -> None:
        """Look at every tensor of a model's checkpoint, so that its routers are known."""
        self.routers = routers(shapes)

    def __call__(self, name: str, shape: Shape) -> bool:
        """Whether this tensor is quantised."""
        return self.reason(name, shape) is None

    def reason(self, name: str, shape: Shape) -> str | None:
        """Why the tensor keeps its precision; None when it is quantised.

        Raises:
            ConfigError: experts stored in one tensor, which the codec did not take apart.
        """
        left_alone = self._left_alone(name, shape)
        if left_alone is None and len(shape) > 2:
            raise ConfigError(
                f"{name} {list(shape)} holds all experts of a layer, and each expert is quantised apart: use bf16, or "
                f"leave them alone with {self.origin}"
            )
        return left_alone

    def spares(self, name: str, shape: Shape) -> bool:
        """Whether the tensor keeps its precision under the name it has, be it one matrix or experts in one tensor."""
        return self._left_alone(name, shape) is not None

    def _left_alone(self, name: str, shape: Shape) -> str | None:
        left_alone = self._always(name, shape)
        if left_alone is None and not self._wanted(name):
            left_alone = f"{self.only_origin}: not among {', '.join(self.only)}"
        if left_alone is None:
            left_alone = next((f"{k.origin}: {found}" for k in self.exclusions if (found := k.finds(name))), None)
        return left_alone

    def _eligible(self, name: str, shape: Shape) -> bool:
        """Whether the format would apply if the user had not said otherwise."""
        return self._always(name, shape) is None and self._wanted(name)

    def _wanted(self, name: str) -> bool:
        return not self.only or any(matches(s, name) for s in self.only)

    def _always(self, name: str, shape: Shape) -> str | None:
        """Why no run quantises this tensor; None when it may."""
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
        joined = [name for name, shape in shapes.items() if stacked(name, shape)]
        if joined:
            notes.append(
                f"{len(joined)} tensors hold the experts of a layer in a way that no format takes apart, and keep their precision; "
                f"the first is {joined[0]} {list(shapes[joined[0]])}"
            )
        for origin, selector in [(k.origin, s) for k in self.exclusions for s in k.selectors]:
            found = [name for name in shapes if matches(selector, name)]
            if found and not any(self._eligible(name, shapes[name]) for name in found):
                notes.append(f"{origin}: {selector!r} changes nothing, what it matches is not quantised anyway")
            elif not found and selector.replace("_", "") in _HABITS:
                notes.append(f"{origin}: {selector!r} matches no tensor of this model")
            elif not found:
                raise ConfigError(
                    f"{origin}: {selector!r} matches none of the model's {len(shapes)} tensors"
                    f"{_nearest(selector, shapes)}; a selector is part of a name, or a glob with * for all of it"
                )
        if self.only and not any(self._eligible(name, shape) for name, shape in shapes.items()):
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
    """``; nearest: a, b`` among whole names and their parts; nothing when none is like it."""
    wanted = selector.replace("*", "").strip(".")
    pieces = {piece for name in names for piece in (name, *name.split(".")) if not piece.isdigit()}
    close = nearest(wanted, sorted(pieces))
    return f"; nearest: {', '.join(close)}" if close else ""
