"""Per-token results of a pass: which columns a model can compute, and their order in the batch."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context, Output
from miles_core.data.batch import Batch
from miles_core.errors import MilesError
from miles_embedded.model.logprobs import scatter
from miles_embedded.model.parts import is_critic, text_configuration, value_head
from miles_embedded.model.value_head import values_of
from miles_embedded.trainer.packing import Packing, spans

#: Columns that ``EmbeddedTrainer.columns`` can compute.
COLUMNS = ("log_probs", "entropy", "values", "top_tokens", "top_log_probs", "log_normalizer")


def check_columns(model: nn.Module, wanted: Collection[str], top_k: int) -> None:
    """Check that ``model`` can compute the columns ``wanted``, with the ``top_k`` most probable tokens.

    Raises:
        MilesError: it cannot.
    """
    without = {"values"} if value_head(model) is None else set()
    given = {"values"} if is_critic(model) else {*COLUMNS} - without
    if lacking := sorted({*wanted} - given):
        raise MilesError(
            f"this model computes {', '.join(sorted(given))} and not {', '.join(lacking)}: the model of a policy with the role critic "
            "has a value head in place of its output layer, other models have no value head"
        )
    if top_k > text_configuration(model).vocab_size:
        raise MilesError(
            f"top_k is {top_k}, but the model's vocabulary has {text_configuration(model).vocab_size} tokens"
        )


def predict_values(model: nn.Module, hidden: Tensor, ctx: Context, packing: Packing, tokens: int) -> Tensor | None:
    """Compute the values of a model with a value head; None without one, or if the pass does not need them.

    Args:
        model: the model.
        hidden: [targets, hidden], the last hidden state from which each target is predicted.
        ctx, packing: of the pass.
        tokens: number of flat tokens.
    """
    module = value_head(model)
    if module is None or not (is_critic(model) or ctx.kind == "train" or "values" in ctx.wanted):
        return None
    return scatter(values_of(module, hidden), packing.targets, tokens)


def gather_columns(
    batch: Batch, results: list[tuple[list[int], Output]], names: tuple[str, ...], top_k: int = 0
) -> dict[str, Tensor]:
    """Combine the outputs of micro-batches in the order of ``batch``.

    Args:
        batch: the samples of all micro-batches, T flat tokens.
        results: sample indices and output of each micro-batch.
        names: the columns.
        top_k: size of the second dimension of ``top_*`` columns.

    Returns:
        name -> [T] or [T, top_k], on the batch's device; 0 where nothing was computed.
    """
    home = batch.tokens.device
    out = {}
    for name in names:
        parts = [getattr(output, name).to(home) for _, output in results]
        more = (top_k,) if name.startswith("top_") else ()
        kind = parts[0].dtype if parts else torch.int32 if name == "top_tokens" else torch.float32
        out[name] = torch.zeros(len(batch.tokens), *more, dtype=kind, device=home)
        for (samples, _), values in zip(results, parts, strict=True):
            out[name][_find_tokens(batch, samples)] = values
    return out


def _find_tokens(batch: Batch, samples: list[int]) -> Tensor:
    """Return the flat indices of these samples' tokens, in the order of ``samples``."""
    starts, lengths = (column.cpu().numpy()[samples] for column in (batch.starts, batch.lengths))
    return torch.from_numpy(spans(starts, lengths)).to(batch.tokens.device)
