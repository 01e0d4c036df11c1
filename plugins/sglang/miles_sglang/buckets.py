"""Buckets of tensors on their way into SGLang.

A bucket is one array of bytes and the name, dtype, shape and place of each tensor in it. On a GPU of this machine only a
handle of the array travels (CUDA IPC): SGLang's schedulers copy from the trainer's memory. Otherwise the bytes do.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from miles_sglang.loader import COMPLETE

#: A tensor begins at a multiple of this many bytes, so that it can be viewed in its own dtype.
ALIGNMENT = 64
#: Where the arguments of ``rebuild_cuda_tensor`` hold the device.
_DEVICE = 6


@dataclass
class Bucket:
    """Tensors that travel together: ``tensors`` describes them, [name, dtype, shape, first byte]; ``size`` bytes in all."""

    named: list[tuple[str, Tensor]] = field(default_factory=list)
    tensors: list[list[Any]] = field(default_factory=list)
    size: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, which is read when the bucket is made flat."""
        self.named.append((name, tensor))
        self.tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.size])
        nbytes = tensor.numel() * tensor.element_size()
        self.size += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def flatten(self, device: str = "") -> Flat:
        """Copy the tensors into one array: on their device, or from host memory to ``device`` where one is named."""
        own = self.named[0][1].device if self.named else torch.device("cpu")
        place = torch.device(device) if device and own.type == "cpu" else own
        array = torch.empty(self.size, dtype=torch.uint8, device=place)
        sources = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in self.named]
        ends = [*(start for _, _, _, start in self.tensors[1:]), self.size]
        places = array.split([end - start for (_, _, _, start), end in zip(self.tensors, ends, strict=True)])
        torch._foreach_copy_([p[: s.numel()] for p, s in zip(places, sources, strict=True)], sources)
        return Flat(array, self.tensors)


@dataclass
class Flat:
    """A bucket's bytes and what is in them; must live until SGLang has copied it."""

    array: Tensor
    tensors: list[list[Any]]

    def message(self, ranks: int) -> tuple[dict[str, Any], bytes | memoryview]:
        """What travels: plain data, and the bytes where the array is not on a GPU."""
        body: dict[str, Any] = {"tensors": self.tensors, "size": self.array.numel()}
        if self.array.is_cuda:
            return {**body, "handles": handles(self.array, ranks)}, b""
        return body, self.array.numpy().data


def divide(named: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Buckets of at most ``limit`` bytes (one tensor at least), in order; a bucket's tensors are on one device. At least
    one bucket comes, so that there is a last one."""
    bucket = Bucket()
    for name, tensor in named:
        nbytes = tensor.numel() * tensor.element_size()
        other = bucket.named and bucket.named[0][1].device != tensor.device
        if bucket.named and (other or bucket.size + nbytes > limit):
            yield bucket
            bucket = Bucket()
        bucket.add(name, tensor)
    yield bucket


def handles(array: Tensor, ranks: int) -> list[list[Any]]:
    """What each of ``ranks`` processes on this machine needs to open a GPU array: the arguments of torch's
    ``rebuild_cuda_tensor`` as plain data, the device by its UUID because processes number devices differently. The array
    must live until all of them have copied it; each has its own count of references."""
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(array.device).uuid)
    found = []
    for _ in range(ranks):
        _, arguments = reduce_tensor(array)
        kinds = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        # tensor class, size, stride, offset, storage class, dtype: constant here, made again on the other side
        found.append([_plain(item) for item in kinds[_DEVICE:]])
    return found


def _plain(item: Any) -> Any:
    return {"base64": base64.b64encode(item).decode()} if isinstance(item, bytes) else item


class _Opened:
    """Pickles as a call of ``rebuild_cuda_tensor``, so that the process that unpickles it opens the array."""

    def __init__(self, size: int, plain: list[Any]) -> None:
        rest = [base64.b64decode(item["base64"]) if isinstance(item, Mapping) else item for item in plain]
        self.arguments = (torch.Tensor, torch.Size([size]), (1,), 0, torch.storage.TypedStorage, torch.uint8, *rest)

    def __reduce__(self) -> tuple[Any, ...]:
        from torch.multiprocessing import reductions

        return reductions.rebuild_cuda_tensor, self.arguments


def for_sglang(body: Mapping[str, Any], payload: bytes, ranks: int) -> tuple[Any, list[bytes]]:
    """A bucket as ``loader.load`` is given it, one serialised copy a tensor-parallel rank, made in SGLang's process.

    Args:
        body: ``tensors``, ``size``, ``handles`` where the array is on a GPU, and the ``weight_version`` that is complete with it.
        payload: the array's bytes, where it is not.

    Returns:
        what must live until the schedulers have copied it, and the serialised copies.
    """
    from sglang.srt.utils import MultiprocessingSerializer

    if body.get("handles"):
        arrays: list[Any] = [_Opened(body["size"], plain) for plain in body["handles"]]
    else:
        arrays = [torch.frombuffer(bytearray(payload), dtype=torch.uint8)] * ranks
    table = json.dumps(body["tensors"])
    last = [] if body.get("weight_version") is None else [(COMPLETE, torch.empty(0, dtype=torch.uint8))]
    return arrays, [MultiprocessingSerializer.serialize([(table, array), *last]) for array in arrays]
