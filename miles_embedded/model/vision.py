"""What the language model reads in place of images: features of the model's own tower, positions, and blocks.

``Vision.inputs`` makes the arguments of the decoder stack for a flat row of tokens, as engine and trainer pack them. Embeddings of
placeholders are replaced by features, which ``get_image_features`` of the Transformers model computes, and positions with several axes come
from its ``get_rope_index``; other families count tokens. In families whose forward reads ``token_type_ids`` (Gemma 3), consecutive features
are a block that attends in both directions. Each image is computed once per call.

The features of a sequence's media fill the placeholders of their expansions, in order. Further placeholders are tokens that the model sampled,
and are embedded as such.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.data.batch import Batch
from miles_core.data.media import Media
from miles_core.errors import MilesError
from miles_embedded.model.attention import BLOCKS
from miles_embedded.model.image_processor import ImageProcessor
from miles_embedded.model.parts import configuration

#: Media of one sequence.
Item = tuple[Media, ...]


@dataclass
class Features:
    """Features of images, one after the other.

    Attributes:
        rows: [features, hidden] in place of embeddings.
        deep: [features, hidden] each, added to the hidden states after the first layers (Qwen3-VL).
        start: image -> index of its first feature.
        counts: image -> number of its features.
    """

    rows: Tensor
    deep: list[Tensor] = field(default_factory=list)
    start: dict[Media, int] = field(default_factory=dict)
    counts: dict[Media, int] = field(default_factory=dict)


class Vision:
    """The tower and the positions of a model that reads images.

    Args:
        model: prepared by ``miles_embedded.model.load``, with its tower.
        processor: the model's processor.
    """

    def __init__(self, model: nn.Module, processor: ImageProcessor) -> None:
        outer: Any = getattr(model, "model", None)
        if not hasattr(outer, "get_image_features"):
            raise MilesError(f"{type(model).__name__} has no tower for images; run it without --media")
        self.outer, self.processor = outer, processor
        self.placeholder = int(configuration(model).image_token_id)
        #: Whether the features of an image attend to each other in both directions.
        self.blocks = has_blocks(model)

    def check(self, tokens: Sequence[int], media: Item) -> None:
        """Raise MilesError unless ``tokens`` have the expansion of each of ``media``, in order."""
        self._find_places(np.asarray(tokens), media)

    def _find_places(self, tokens: np.ndarray, media: Item) -> np.ndarray:
        """Return the indices of the placeholders for the features of ``media``.

        Raises:
            MilesError: an expansion is missing.
        """
        found = self.processor.find_places(tokens, self.placeholder, media)
        return np.concatenate([np.zeros(0, np.int64), *found])

    def inputs(
        self, tokens: Tensor, lengths: Sequence[int], media: Sequence[Item], rows: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the arguments of the decoder stack for some rows of flat tokens.

        Args:
            tokens: [T] ids of sequences, one after the other.
            lengths: number of tokens of each sequence.
            media: media of each sequence.
            rows: [R] indices of the tokens to compute; None for all.
        """
        host = tokens.cpu().numpy()
        features = self.features(list(dict.fromkeys(item for items in media for item in items)))
        place = np.full(len(host), -1, np.int64)
        positions, blocks = np.zeros((3, len(host)), np.int64), np.zeros(len(host), np.int64)
        known: dict[tuple[Item, bytes], np.ndarray] = {}
        start = 0
        for length, items in zip(lengths, media, strict=True):
            own = slice(start, start + length)
            filled = self._find_places(host[own], items)
            index = [np.arange(features.counts[m]) + features.start[m] for m in items]
            place[own][filled] = np.concatenate([np.zeros(0, np.int64), *index])
            blocks[own] = _number_runs(place[own] >= 0)
            end = int(filled[-1]) + 1 if len(filled) else 0
            key = items, host[own][:end].tobytes()
            if key not in known:
                known[key] = self._positions(host[own][:end], place[own][:end] >= 0, items)
            positions[:, own] = _continue(known[key], length)
            start += length
        picked = torch.arange(len(host), device=tokens.device) if rows is None else rows
        moved = [torch.from_numpy(x).to(tokens.device)[..., picked] for x in (place, positions, blocks)]
        return self._arguments(tokens[picked], moved[0], moved[1], moved[2], features)

    def _arguments(
        self, tokens: Tensor, place: Tensor, positions: Tensor, blocks: Tensor, features: Features
    ) -> dict[str, Any]:
        """Return the arguments from [R] tokens, [R] index of each one's feature (-1 for text), [3, R] positions and [R] blocks."""
        mask, index = place >= 0, place[place >= 0]
        embedded = self.outer.get_input_embeddings()(tokens.masked_fill(mask, 0))  # some placeholders have no embedding
        chosen = features.rows[index].to(embedded.dtype)
        found: dict[str, Any] = {
            "inputs_embeds": embedded.masked_scatter(mask.unsqueeze(-1), chosen).unsqueeze(0),
            "position_ids": positions.unsqueeze(1) if self.axes == 3 else positions[:1],
        }
        if features.deep:
            deep = [rows[index].to(embedded.dtype) for rows in features.deep]
            found |= {"visual_pos_masks": mask.unsqueeze(0), "deepstack_visual_embeds": deep}
        if self.blocks:
            found[BLOCKS] = blocks
        return found

    @property
    def axes(self) -> int:
        """Number of axes of a position: 3 in families with ``get_rope_index``, else 1."""
        return 3 if hasattr(self.outer, "get_rope_index") else 1

    def features(self, media: Sequence[Media]) -> Features:
        """Compute the features of images."""
        found = [self._compute(item) for item in media]
        made = Features(torch.cat([rows for rows, _ in found]) if found else torch.zeros(0, 1))
        for item, (rows, _) in zip(media, found, strict=True):
            made.start[item], made.counts[item] = sum(made.counts.values()), len(rows)
        made.deep = [torch.cat(layer) for layer in zip(*(deep for _, deep in found), strict=True)]
        return made

    def _compute(self, media: Media) -> tuple[Tensor, list[Tensor]]:
        """Return the features of one image [n, hidden], and those of further layers."""
        device = next(self.outer.parameters()).device
        given = {name: value.to(device) for name, value in self.processor.inputs(media).items()}
        found: Any = self.outer.get_image_features(**given, return_dict=True)
        return _flatten(found.pooler_output), [_flatten(x) for x in getattr(found, "deepstack_features", None) or ()]

    def _positions(self, tokens: np.ndarray, filled: np.ndarray, media: Item) -> np.ndarray:
        """Return the positions [3, tokens] of a sequence that ends with its last feature; ``filled`` are the features."""
        if self.axes == 1 or not len(tokens):
            return np.broadcast_to(np.arange(len(tokens)), (3, len(tokens)))
        kinds = torch.from_numpy(filled.astype(np.int64))[None]
        grids = torch.cat([self.processor.inputs(item)["image_grid_thw"] for item in media])
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        found: Tensor = self.outer.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)[0]
        return found[:, 0].numpy()


def has_blocks(model: nn.Module) -> bool:
    """Return whether the features of an image attend to each other in both directions."""
    outer: Any = getattr(model, "model", model)
    return "token_type_ids" in inspect.signature(type(outer).forward).parameters


def shares(model: nn.Module, batch: Batch) -> bool:
    """Return whether siblings may share a prompt: not if a replayed column could end the shared part inside a block."""
    return not (batch.media and batch.inputs and has_blocks(model))


def _number_runs(inside: np.ndarray) -> np.ndarray:
    """Number the runs of consecutive true values [n]; -1 outside."""
    starts = inside.copy()
    starts[1:] &= ~inside[:-1]
    return np.where(inside, starts.cumsum() - 1, -1)


def _continue(positions: np.ndarray, length: int) -> np.ndarray:
    """Extend positions [3, n] by text to [3, length]; it starts after the largest position."""
    start = int(positions.max()) + 1 if positions.size else 0
    text = np.broadcast_to(start + np.arange(length - positions.shape[1]), (3, length - positions.shape[1]))
    return np.concatenate([positions, text], 1)


def _flatten(found: Any) -> Tensor:
    """Return features [n, hidden] of one image, from a tensor [..., hidden] or tensors of parts."""
    rows = found if isinstance(found, Tensor) else torch.cat([part.flatten(0, -2) for part in found])
    return rows.flatten(0, -2)
