"""The weights of a checkpoint directory, read one parameter of a model at a time.

A frozen base may be larger than the memory of the host: its parameters are read one after the other, and a quantised checkpoint gives its codes
without decoding them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from miles_core.data.weight_unit import Encoded
from miles_core.errors import CheckpointError
from miles_core.precision.codec import Codec
from miles_core.precision.format import part_name
from miles_embedded.model.views import View, sources, views

if TYPE_CHECKING:
    from miles_formats.convert.decode import QuantizedFiles


class StoredWeights:
    """The weights of ``model``, whose parameters and persistent buffers determine dtype and device, in the files of a checkpoint.

    Args:
        model: without values.
        files: a ``CheckpointFiles``, or a ``QuantizedFiles``.
    """

    def __init__(self, model: nn.Module, files: Any) -> None:
        self._quantized: QuantizedFiles | None = files if hasattr(files, "encoded") else None
        self._files = files
        self._tensors = sources(model)
        self._views: dict[str, list[View]] = {}
        for view in views(model):
            self._views.setdefault(view.source, []).append(view)
        self._shapes = (
            {name: entry.shape for name, entry in files.entries.items()}
            if self._quantized is None
            else self._quantized.shapes | {joined.name: joined.shape for joined in self._quantized.joined}
        )
        self._joined = {} if self._quantized is None else {joined.name: joined for joined in self._quantized.joined}

    def missing(self) -> str | None:
        """Return the name of a tensor of the model that no file has under this name; None if all are found.

        Raises:
            CheckpointError: a tensor has another shape.
        """
        for members in self._views.values():
            for view in members:
                shape = self._shapes.get(view.name)
                if shape is None:
                    return view.name
                if tuple(shape) != view.size:
                    raise CheckpointError(
                        f"{view.name} is {list(shape)} in its weights and {list(view.size)} by its config.json: the files belong to "
                        "different models; copy both again"
                    )
        return None

    def values(self, source: str) -> Tensor:
        """Read a parameter or buffer, in its shape, strides and dtype, on its device.

        Raises:
            CheckpointError: it contains a number that is not finite.
        """
        like = self._tensors[source]
        values = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        for view in self._views[source]:
            tensor = self._read(view.name, like.dtype).to(like.device)
            if tensor.is_floating_point():
                _check_finite(view.name, tensor)
            view.of(values).copy_(tensor)
        return values

    def codes(self, names: Sequence[str], codec: Codec) -> list[Encoded] | None:
        """Return the codes of these weights as the checkpoint has them; None if one of them is not stored in the codec's format.

        Raises:
            CheckpointError: a scale is not finite.
        """
        files, format = self._quantized, codec.format
        if files is None or format is None or any(name not in files.encoded for name in names):
            return None
        sizes = {name: (files.shapes[name][0], files.shapes[name][1]) for name in names}
        alike = type(files.format) is type(format)
        if not alike or any(files.format.storage(size) != format.storage(size) for size in sizes.values()):
            return None
        if not all(codec.quantises(name, size) for name, size in sizes.items()):
            return None
        found = []
        for name in names:
            parts = {part_name(name, s): files.files.read(entry.name) for s, entry in files.encoded[name].items()}
            for part, tensor in parts.items():
                if tensor.is_floating_point():
                    _check_finite(part, tensor.float())
            found.append(Encoded(name, parts, format.name))
        return found

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        files = self._quantized
        if files is None or name not in self._joined:
            found: Tensor = self._files.read(name)
            return found
        joined = self._joined[name]
        return torch.stack([files.slab(joined, expert, dtype) for expert in range(len(joined.members))])


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.sum(
        dtype=torch.float32
    ).isfinite():  # one pass and no mask; the sum of finite values may overflow, so look closer below
        return
    if len(where := (~tensor.isfinite()).nonzero()):
        value = tensor[tuple(where[0])].item()
        raise CheckpointError(
            f"{name} holds {len(where)} values that are not finite, the first ({value}) at {where[0].tolist()}; copy the checkpoint "
            "again, or repair it"
        )
