"""Value heads: by default a linear layer on the last hidden state.

A critic has the policy's architecture with this head in place of the output layer (Ouyang et al., arXiv 2203.02155). The head is
initialised to zero, so the first values are 0 on every rank and the first advantages equal those without a baseline.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from miles_core.errors import CheckpointError, PluginError
from miles_embedded.model.parts import VALUE_HEAD, VALUES_ONLY, configuration, head, is_critic, text_configuration


def make_head(run: Any, policy: Any, model: nn.Module) -> nn.Module:
    """Make the head named ``linear``."""
    like = next(model.parameters())
    made = nn.Linear(text_configuration(model).hidden_size, 1, device=like.device, dtype=like.dtype)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def replace_output(run: Any, policy: Any, model: nn.Module) -> None:
    """Make a critic of a model: its value head is in place of the output layer."""
    add_value_head(model, new_value_head(run, policy, model), alone=True)


def new_value_head(run: Any, policy: Any, model: nn.Module) -> nn.Module:
    """Make the head of the first active plugin that provides one (default ``linear``) for a model's hidden states."""
    name = run.hooks.find_provided("head")[0]
    made = run.hooks.make("head", name, run=run, policy=policy, model=model)
    if not isinstance(made, nn.Module):
        raise PluginError(f"the head {name!r} is {made!r:.80}; make_head must return a torch.nn.Module")
    return made


def add_value_head(model: nn.Module, module: nn.Module, alone: bool = False) -> None:
    """Add a value head to a model; call it before the trainer is made, as in ``on_model``.

    Training passes then return ``Output.values`` too, and ``Trainer.columns`` computes ``values``. The head is trained, sharded and saved
    with the model, and its weights are part of the export stream under names that start with ``VALUE_HEAD``.

    Args:
        model: the model.
        module: the head.
        alone: the head is in place of the output layer, which is not used, and is frozen unless its weight is the embedding. Passes return
            only ``Output.values``.
    """
    setattr(model, VALUE_HEAD, module)
    if not alone:
        return
    setattr(model, VALUES_ONLY, True)
    output, embedding = head(model), model.get_input_embeddings()  # type: ignore[operator]
    if output.weight is not embedding.weight:
        output.requires_grad_(False)


def values_of(module: nn.Module, hidden: Tensor) -> Tensor:
    """Apply a value head: [rows, hidden] -> [rows] float32. PluginError if it returns another shape."""
    found: Tensor = module(hidden.to(next(module.parameters()).dtype))
    if found.dim() == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.shape != hidden.shape[:1]:
        raise PluginError(
            f"the value head {type(module).__name__} returned shape {list(found.shape)} for {len(hidden)} rows; it must return one value "
            "per row"
        )
    return found.float()


def is_classifier(model: nn.Module) -> bool:
    """Whether the model's checkpoint is a sequence classifier, which is stored without an output layer for tokens."""
    return any(name.endswith("ForSequenceClassification") for name in configuration(model).architectures or ())


def refuse_classifier(model: nn.Module, path: object) -> None:
    """CheckpointError if the model of the checkpoint ``path`` is a classifier, and has no value head in place of its output layer."""
    if is_classifier(model) and not is_critic(model):
        raise CheckpointError(
            f"{path}: it is a classifier ({configuration(model).architectures[0]}), whose scores are in place of an output layer, so it predicts "
            "no tokens; choose a causal language model"
        )
