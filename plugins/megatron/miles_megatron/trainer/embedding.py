"""The embedding's padding row, which gets no gradient from look-ups, as with ``padding_idx`` of torch's embedding.

Tokens that are trained contain the padding token where a model uses it for something else, too: ``pad_token_id`` of SmolLM2 is the end of
every turn. A tied output layer still gives the row a gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def stop_padding_gradient(chunk: Any, row: int | None) -> None:
    """Set the gradient of a chunk's embedded padding tokens to 0.

    Args:
        chunk: Megatron-Core's model, not wrapped; chunks without an embedding stay unchanged.
        row: row of the padding token in the whole table, or None.
    """
    embedding: Any = getattr(chunk, "embedding", None)
    if embedding is None or row is None:
        return

    def mask_gradient(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        # tensor-parallel ranks have summed their parts of the output, so each of them masks the gradient of all its rows
        if not output.requires_grad:
            return
        padding = args[0] == row  # [1, tokens]
        if module.reduce_scatter_embeddings:  # the output is [tokens of this rank, 1, hidden]
            padding = padding.t().chunk(module.tp_group.size())[module.tp_group.rank()]
        output.register_hook(lambda gradient: gradient.masked_fill(padding.unsqueeze(-1), 0))

    embedding.word_embeddings.register_forward_hook(mask_gradient)
