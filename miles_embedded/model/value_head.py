"""The value head of a critic: one linear layer on the last hidden state.

A critic is the policy's architecture with this head in place of the output layer (Ouyang et al., arXiv 2203.02155). The head starts at
zero, so the first values are 0 on every rank, and the first advantages are those of no baseline.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from miles_core.errors import PluginError
from miles_embedded.model.configuration import head, text_configuration

#: Name of the head among a model's submodules.
VALUE_HEAD = "miles_value_head"


def make_head(run: Any, policy: Any, model: nn.Module) -> nn.Module:
    """The provider of the head named ``linear``."""
    like = next(model.parameters())
    made = nn.Linear(text_configuration(model).hidden_size, 1, device=like.device, dtype=like.dtype)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def add_value_head(run: Any, policy: Any, model: nn.Module) -> None:
    """Give a critic's model the head that the first active plugin provides, else the linear one; its output layer is not used, and
    not trained where it is not the embedding too."""
    name = run.hooks.provided("head")[0]
    made = run.hooks.make("head", name, run=run, policy=policy, model=model)
    if not isinstance(made, nn.Module):
        raise PluginError(f"the head {name!r} is {made!r:.80}; make_head returns a torch.nn.Module")
    setattr(model, VALUE_HEAD, made)
    output, embedding = head(model), model.get_input_embeddings()  # type: ignore[operator]
    if output.weight is not embedding.weight:
        output.requires_grad_(False)


def value_head(model: nn.Module) -> nn.Module | None:
    """The value head of a critic's model; None of any other."""
    found: nn.Module | None = getattr(model, VALUE_HEAD, None)
    return found


def values_of(module: nn.Module, hidden: Tensor) -> Tensor:
    """[rows, hidden] -> [rows] float32."""
    found: Tensor = module(hidden.to(next(module.parameters()).dtype))
    if found.dim() == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.shape != hidden.shape[:1]:
        raise PluginError(
            f"the value head {type(module).__name__} returned shape {list(found.shape)} for {len(hidden)} rows; it returns one value for "
            "each row"
        )
    return found.float()
