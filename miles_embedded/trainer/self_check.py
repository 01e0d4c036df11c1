"""Self-check of the embedded trainer, for runs with another engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from miles_core.contracts.trainer import Context
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.logprobs import token_log_probs
from miles_embedded.model.parts import backbone, decoder_layers
from miles_embedded.model.self_check import check_scores
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.packing import pack_grown


def self_check(model: nn.Module) -> None:
    """Compare log-probabilities of packed samples, as computed in training, with plain forwards.

    Raises:
        CheckpointError: they differ by more than rounding, or the packed forward fails.
    """
    check_scores(model, {"packed samples are trained": lambda sequences: _score_packed(model, sequences)})


@torch.no_grad()
def _score_packed(model: nn.Module, sequences: list[list[int]]) -> list[np.ndarray]:
    """Return log p of every token after the first, [len - 1] per sequence, from one packed forward."""
    samples = [
        Sample(tokens=tokens, response_length=len(tokens) - 1, group_index=number, index=number)
        for number, tokens in enumerate(sequences)
    ]
    batch = collate(samples)
    packing = pack_grown(batch, True, rope_switch(model))
    device = next(model.parameters()).device
    moved = {name: getattr(packing, name).to(device) for name in ("rows", "positions", "row_of", "sources", "targets")}
    packing = replace(packing, **moved)
    tokens = batch.tokens.to(device)
    context = Context("old", tuple(range(len(decoder_layers(model)))), packing.rows)
    hidden = backbone(model)(
        input_ids=tokens[packing.rows].unsqueeze(0),
        position_ids=packing.positions.unsqueeze(0),
        use_cache=False,
        call=PackedCall(context, packing),
    ).last_hidden_state[0]
    log_probs, _ = token_log_probs(model, hidden.index_select(0, packing.sources), tokens[packing.targets])
    return np.split(log_probs.float().cpu().numpy(), np.cumsum([len(s) - 1 for s in sequences])[:-1])
