"""Number of parameters of a tower for images with its projector, from ``config.json``, and bytes per patch. Does not import torch.

Counts matrices and tables of positions; biases and norms are small in comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Model types whose feed-forward layers in the tower have a gate.
_GATED = ("qwen2_5_vl", "glm4v", "mistral3")


@dataclass(frozen=True)
class TowerSize:
    """Sizes of a tower.

    Attributes:
        parameters: all parameters, with those of the projector.
        layers: number of layers.
        width: width of its hidden states.
        inner: units of a feed-forward layer.
        pixels: values of a patch.
        patches: patches of a feature.
    """

    parameters: int
    layers: int
    width: int
    inner: int
    pixels: int
    patches: int

    def activations(self, width: int) -> int:
        """Bytes per feature that a backward pass through the tower keeps, with elements of ``width`` bytes: of each patch and layer the inputs
        of two norms in FP32 and their outputs, queries, keys and values, the attention output, and the feed-forward layer."""
        layer = 2 * (2 * self.width * width + 4 * self.width) + width * (6 * self.width + 4 * self.inner)
        return self.patches * (self.layers * layer + 4 * self.pixels)


def tower_size(config: Mapping[str, Any]) -> TowerSize | None:
    """Compute the sizes of a model's tower; None if ``config.json`` describes no tower, or not completely."""
    vision, text = config.get("vision_config"), config.get("text_config")
    if not isinstance(vision, Mapping):
        return None
    kind, text = str(config.get("model_type")), text if isinstance(text, Mapping) else config

    def first(*names: str, default: int = 0) -> int:
        found = next((vision[name] for name in names if vision.get(name)), default)
        return int(found[0] if isinstance(found, list) else found)

    width, layers, patch = first("embed_dim", "hidden_size"), first("depth", "num_hidden_layers"), first("patch_size")
    hidden = int(text.get("hidden_size") or 0)
    if not (width and layers and patch and hidden):
        return None
    out = first("out_hidden_size", default=first("hidden_size") if "embed_dim" in vision else hidden)
    inner = out if kind == "glm4v" else first("intermediate_size", default=int(width * (vision.get("mlp_ratio") or 4)))
    merge = first("spatial_merge_size", default=int(config.get("spatial_merge_size") or 1))
    pixels = first("in_channels", "num_channels", default=3) * first("temporal_patch_size", default=1) * patch**2
    matrices = 3 if kind in _GATED else 2
    side = first("image_size") // patch
    positions = 0 if kind == "mistral3" else first("num_position_embeddings", default=side**2)
    if kind == "internvl":
        merge = round(1 / float(config.get("downsample_ratio") or 0.5))
    counted = layers * (4 * width**2 + matrices * width * inner) + (pixels + positions) * width
    projector = _projector(kind, vision, width, hidden, out, merge)
    return TowerSize(int(counted + projector), layers, width, inner, pixels, merge**2)


def _projector(kind: str, vision: Mapping[str, Any], width: int, hidden: int, out: int, merge: int) -> int:
    """Return the parameters between the tower and the language model."""
    merged = width * merge**2
    if kind == "glm4v":
        return merged * out + out**2 + 3 * out * int(vision.get("intermediate_size") or 4 * out)
    if kind == "gemma3":
        return width * hidden + 12 * width**2  # and SigLIP's pooling, which the model does not use
    if kind == "mistral3":
        return merged * width + width * hidden + hidden**2
    if kind in ("internvl", "llava", "llava_next"):
        return merged * hidden + hidden**2
    return (merged**2 + merged * out) * (1 + len(vision.get("deepstack_visual_indexes") or ()))
