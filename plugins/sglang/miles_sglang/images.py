"""Images in requests: what the model's processor made of them, in the form that SGLang accepts next to already expanded token ids.

SGLang's own processor would decode a prompt, expand its placeholders and tokenise it again. A request therefore carries one entry of
``image_data`` with SGLang's format ``processor_output``: the inputs of the tower that the trainer computes with, the places of the features in
the tokens, and the positions of the tokens. So engine and trainer see the same pixels and the same ids, whatever versions of Transformers they
run with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from miles_core.data import Media
    from miles_embedded import ImageProcessor


@dataclass(frozen=True)
class ImageInputs:
    """The images of one request. They are read when the request is sent, so that requests that wait hold no pixels.

    Attributes:
        reader: makes the inputs.
        media: the images.
        places: for each image, the indices of its features in the tokens.
        length: number of tokens.
    """

    reader: ImageReader
    media: tuple[Media, ...]
    places: Sequence[NDArray[np.int64]]
    length: int

    def message(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the entry of ``image_data`` and the bytes of its arrays, which ``read`` takes."""
        arrays = self.reader.arrays(self.media)
        arrays["mrope_positions"] = positions = self.reader.positions(self.places, arrays[GRID], self.length)
        arrays["mrope_position_delta"] = np.array([[positions.max() + 1 - self.length]], np.int64)
        table = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        entry = {
            "format": "processor_output",
            "offsets": [[int(p[0]), int(p[-1])] for p in self.places],
            "arrays": table,
        }
        return entry, [array.reshape(-1).view(np.uint8).data for array in arrays.values()]


#: Name of the array with the size of each image: [images, 3] frames, rows and columns of patches.
GRID = "image_grid_thw"


@dataclass(frozen=True)
class ImageReader:
    """Finds and processes the images of one model.

    Attributes:
        processor: the model's image processor.
        placeholder: token id in the place of a feature.
        merge: patches of a feature, along one side.
    """

    processor: ImageProcessor
    placeholder: int
    merge: int

    @classmethod
    def of(cls, processor: ImageProcessor, config: Mapping[str, Any]) -> ImageReader:
        """Make the reader of a model with this ``config.json``."""
        return cls(processor, int(config["image_token_id"]), int(config["vision_config"].get("spatial_merge_size", 2)))

    def find(self, tokens: Sequence[int], media: tuple[Media, ...]) -> ImageInputs:
        """Find the images of a request.

        Raises:
            MilesError: the tokens do not have the expansion of each image, in order.
        """
        ids = np.asarray(tokens, np.int64)
        return ImageInputs(self, media, self.processor.find_places(ids, self.placeholder, media), len(ids))

    def arrays(self, media: Sequence[Media]) -> dict[str, NDArray[Any]]:
        """Return the inputs of the tower for images, one after the other."""
        given = [self.processor.inputs(item) for item in media]
        return {name: np.concatenate([np.ascontiguousarray(g[name].numpy()) for g in given]) for name in given[0]}

    def positions(self, places: Sequence[NDArray[np.int64]], grids: NDArray[Any], length: int) -> NDArray[np.int64]:
        """Return the positions [3, length] (time, row, column) of tokens with images of sizes ``grids`` [images, 3] at ``places``.

        Text counts on along all three axes; the features of an image are numbered by their place in it, and the text after it follows its
        largest position (Qwen2-VL, arXiv:2409.12191, section 2.1).
        """
        found, end, then = np.empty((3, length), np.int64), 0, 0
        for place, (frames, rows, columns) in zip(places, grids.tolist(), strict=True):
            start = int(place[0])
            found[:, end:start] = then + np.arange(start - end)
            then += start - end
            sizes = frames, rows // self.merge, columns // self.merge
            found[:, start : start + len(place)] = then + np.indices(sizes).reshape(3, -1)
            end, then = start + len(place), then + max(sizes)
        found[:, end:] = then + np.arange(length - end)
        return found


@dataclass(frozen=True)
class PackedBody:
    """The body of ``generate`` as JSON-compatible data, and the bytes that follow it.

    Attributes:
        body: the body.
        payload: the bytes of its images.
    """

    body: Mapping[str, Any]
    payload: Sequence[memoryview] = ()

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> PackedBody:
        """Process the images of a body, if it has any."""
        images = body.get("image_data")
        if not isinstance(images, ImageInputs):
            return cls(body)
        entry, payload = images.message()
        return cls({**body, "image_data": [entry]}, payload)

    @cached_property
    def size(self) -> int:
        """Number of bytes of ``payload``."""
        return sum(piece.nbytes for piece in self.payload)


def unpack(body: Mapping[str, Any], payload: bytes) -> dict[str, Any]:
    """Inverse of ``PackedBody.of`` in SGLang's process: the arrays as tensors, in memory of their own."""
    if not body.get("image_data"):
        return dict(body)
    import torch

    (entry,) = body["image_data"]
    found, at = {name: value for name, value in entry.items() if name != "arrays"}, 0
    for name, dtype, shape in entry["arrays"]:
        array = np.frombuffer(payload, dtype, int(np.prod(shape)), at)
        at += array.nbytes
        found[name] = torch.from_numpy(array.reshape(shape).copy())
    return {**body, "image_data": [found]}
