"""The weights that get an adapter: linear layers and joined experts (one tensor [experts, ...] per matrix) of the decoder layers.

A target is the end of a name, whole parts only, as in ``peft``'s ``target_modules`` and ``target_parameters``: ``q_proj`` matches
``model.layers.0.self_attn.q_proj``. The output layer and embeddings are not targets, because log-probabilities are computed directly from
the weight of the output layer. Indexers of sparse attention are not targets either, because they get no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from miles_core.plugin import ConfigError
from miles_embedded import decoder_layers

FLAG = "--lora-target-modules"
ALL_LINEAR, ALL_EXPERTS = "all-linear", "all-experts"


@dataclass(frozen=True)
class Target:
    """One weight that gets an adapter.

    Attributes:
        path: name of its module.
        module: the linear layer, or the module of the experts.
        attribute: name of the parameter in the module.
    """

    path: str
    module: nn.Module
    attribute: str

    @property
    def is_joined(self) -> bool:
        """Whether the parameter holds the matrices of all experts."""
        return not isinstance(self.module, nn.Linear)

    @property
    def source(self) -> str:
        """Name of the parameter in the model."""
        return f"{self.path}.{self.attribute}"

    @property
    def name(self) -> str:
        """The name that is matched: of the module for a linear layer, of the parameter for experts."""
        return self.source if self.is_joined else self.path


def find_targets(model: nn.Module, names: Sequence[str]) -> list[Target]:
    """Return the weights of ``model`` that ``names`` select, in module order.

    Args:
        model: with or without weights.
        names: as ``--lora-target-modules``.

    Raises:
        ConfigError: a name selects nothing.
    """
    every = list(_candidates(model))
    known = {ALL_LINEAR: [t for t in every if not t.is_joined], ALL_EXPERTS: [t for t in every if t.is_joined]}
    chosen: set[str] = set()
    for name in names:
        found = known.get(name) or [t for t in every if f".{t.name}".endswith(f".{name}")]
        if not found:
            raise ConfigError(f"{FLAG} {','.join(names)}: {_describe_miss(name, every, model)}")
        chosen |= {t.source for t in found}
    return [t for t in every if t.source in chosen]


def _candidates(model: nn.Module) -> Iterator[Target]:
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    for path, module in model.named_modules():
        if module not in inside or "indexer" in path.split("."):
            continue
        if isinstance(module, nn.Linear):
            if type(module).forward is not nn.Linear.forward:
                continue  # such as a router that returns choices too
            yield Target(path, module, "weight")
        elif "expert" in type(module).__name__.lower():
            for attribute, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    yield Target(path, module, attribute)


def _describe_miss(name: str, every: list[Target], model: nn.Module) -> str:
    ends = list(dict.fromkeys(".".join(t.name.split(".")[-2 if t.is_joined else -1 :]) for t in every))
    if name == ALL_EXPERTS:
        return f"{type(model).__name__} has no joined experts; its decoder layers have {', '.join(ends)}"
    near = get_close_matches(name, [*ends, *(t.name for t in every)], n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"they have {', '.join(ends)}"
    return f"no linear layer or joined experts in the decoder layers of {type(model).__name__} end in {name!r}; {hint}"
