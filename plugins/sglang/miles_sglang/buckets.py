"""Buckets of weights for SGLang.

A bucket is one byte array and a table with the name, dtype, shape and offset of each tensor. For an array on a local GPU only a CUDA
IPC handle is sent, and SGLang's schedulers copy from the trainer's memory. Otherwise the bytes are sent.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miles_sglang.loader import COMPLETE

#: Tensor offsets are multiples of this many bytes, so that each tensor can be viewed in its dtype.
ALIGNMENT = 64
#: Index of the device in the arguments of ``rebuild_cuda_tensor``.
_DEVICE = 6


@dataclass
class Bucket:
    """Tensors that are sent together.

    Attributes:
        named: (name, tensor) pairs.
        tensors: the table: [name, dtype, shape, byte offset] for each tensor.
        size: total bytes, including alignment.
    """

    named: list[tuple[str, Tensor]] = field(default_factory=list)
    tensors: list[list[Any]] = field(default_factory=list)
    size: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor; ``flatten`` reads its values."""
        self.named.append((name, tensor))
        self.tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.size])
        nbytes = tensor.numel() * tensor.element_size()
        self.size += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def flatten(self, device: str = "") -> Flat:
        """Copy the tensors into one array on their device; host tensors go to ``device`` if it is not empty.

        Host tensors that are close together in one storage, as in a block of another process, are copied in one piece and keep their relative
        offsets: from memory that is not pinned, one large copy is several times faster than thousands of small ones.
        """
        own = self.named[0][1].device if self.named else torch.device("cpu")
        place = torch.device(device) if device and own.type == "cpu" else own
        if own.type == "cpu" and (span := self._span()) is not None:
            whole, starts = span
            table = [
                [name, dtype, shape, start] for (name, dtype, shape, _), start in zip(self.tensors, starts, strict=True)
            ]
            return Flat(torch.empty(len(whole), dtype=torch.uint8, device=place).copy_(whole), table)
        array = torch.empty(self.size, dtype=torch.uint8, device=place)
        sources = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in self.named]
        ends = [*(start for _, _, _, start in self.tensors[1:]), self.size]
        places = array.split([end - start for (_, _, _, start), end in zip(self.tensors, ends, strict=True)])
        torch._foreach_copy_([p[: s.numel()] for p, s in zip(places, sources, strict=True)], sources)
        return Flat(array, self.tensors)

    def _span(self) -> tuple[Tensor, list[int]] | None:
        """Return the bytes from the first tensor to the last, and the offset of each; None if the tensors are not aligned, or not close together
        in one storage."""
        first = min((tensor for _, tensor in self.named), key=Tensor.data_ptr, default=None)
        if first is None or len(self.named) == 1:
            return None
        base, storage = first.data_ptr(), first.untyped_storage()
        starts = [tensor.data_ptr() - base for _, tensor in self.named]
        end = max(start + tensor.nbytes for start, (_, tensor) in zip(starts, self.named, strict=True))
        if end > self.size * 5 // 4 or any(start % ALIGNMENT for start in starts):
            return None
        if any(not t.is_contiguous() or t.untyped_storage().data_ptr() != storage.data_ptr() for _, t in self.named):
            return None
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, base - storage.data_ptr(), (end,), (1,))
        return whole, starts


@dataclass
class Flat:
    """The bytes and the table of a bucket. The caller must keep it alive until SGLang has copied it."""

    array: Tensor
    tensors: list[list[Any]]

    def to_host(self) -> Flat:
        """Return the bucket in host memory."""
        return Flat(self.array.cpu(), self.tensors)

    def message(self, ranks: int) -> tuple[dict[str, Any], bytes | memoryview]:
        """Return JSON-compatible data for ``ranks`` processes, and the bytes if the array is not on a GPU."""
        body: dict[str, Any] = {"tensors": self.tensors, "size": self.array.numel()}
        if self.array.is_cuda:
            return {**body, "handles": export_handles(self.array, ranks)}, b""
        return body, self.array.numpy().data


def split_into_buckets(named: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Split tensors into buckets of at most ``limit`` bytes, in order.

    A tensor larger than ``limit`` gets its own bucket. The tensors of a bucket are on one device. The result has at least one
    bucket, possibly empty, so that an update always has a last bucket.
    """
    bucket = Bucket()
    for name, tensor in named:
        nbytes = tensor.numel() * tensor.element_size()
        other = bucket.named and bucket.named[0][1].device != tensor.device
        if bucket.named and (other or bucket.size + nbytes > limit):
            yield bucket
            bucket = Bucket()
        bucket.add(name, tensor)
    yield bucket


def export_handles(array: Tensor, ranks: int) -> list[list[Any]]:
    """Export a GPU array to ``ranks`` processes on this machine.

    Returns one list per process: the arguments of torch's ``rebuild_cuda_tensor`` as JSON-compatible data. It contains the UUID of
    the device because device indices differ between processes. Each process has its own reference count; the array must stay alive
    until all of them have copied it.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(array.device).uuid)
    found = []
    for _ in range(ranks):
        _, arguments = reduce_tensor(array)
        kinds = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        # the first six arguments (class, size, stride, offset, storage class, dtype) are constant; the receiver adds them
        found.append([_to_json(item) for item in kinds[_DEVICE:]])
    return found


def _to_json(item: Any) -> Any:
    return {"base64": base64.b64encode(item).decode()} if isinstance(item, bytes) else item


class _CudaArray:
    """Pickles as a call of ``rebuild_cuda_tensor``, so that unpickling opens the array in the receiving process."""

    def __init__(self, size: int, plain: list[Any]) -> None:
        rest = [base64.b64decode(item["base64"]) if isinstance(item, Mapping) else item for item in plain]
        self.arguments = (torch.Tensor, torch.Size([size]), (1,), 0, torch.storage.TypedStorage, torch.uint8, *rest)

    def __reduce__(self) -> tuple[Any, ...]:
        from torch.multiprocessing import reductions

        return reductions.rebuild_cuda_tensor, self.arguments


class _Bytes:
    """Pickles as the bytes of an array, for processes on other machines, which cannot open shared memory of this one.

    SGLang unpickles only from a list of modules, so the call uses ``functools`` and ``torch``.
    """

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(torch.frombuffer, dtype=torch.uint8), (bytearray(self.payload),)


def serialize_for_sglang(body: Mapping[str, Any], payload: bytes, ranks: int) -> tuple[Any, list[bytes]]:
    """Serialise a bucket for ``loader.load``, once for each tensor-parallel rank. Runs in SGLang's process.

    Args:
        body: ``tensors``, ``size``, ``handles`` if the array is on a GPU, ``copies`` if ranks on other machines need the
            bytes, and the ``weight_version`` that this bucket completes.
        payload: the bytes of the array if it is not on a GPU.
        ranks: number of tensor-parallel ranks.

    Returns:
        (arrays that must stay alive until the schedulers have copied them, serialised buckets)
    """
    from sglang.srt.utils import MultiprocessingSerializer

    table = json.dumps(body["tensors"])
    last = [] if body.get("weight_version") is None else [(COMPLETE, torch.empty(0, dtype=torch.uint8))]
    if body.get("copies"):  # one object for all ranks, so that SGLang's messages contain it once
        end = [(name, _Bytes(b"\0")) for name, _ in last]  # torch rejects an empty buffer
        content = MultiprocessingSerializer.serialize([(table, _Bytes(payload)), *end])
        return payload, [content] * ranks
    if body.get("handles"):
        arrays: list[Any] = [_CudaArray(body["size"], plain) for plain in body["handles"]]
    else:
        arrays = [torch.frombuffer(bytearray(payload), dtype=torch.uint8)] * ranks
    return arrays, [MultiprocessingSerializer.serialize([(table, array), *last]) for array in arrays]
