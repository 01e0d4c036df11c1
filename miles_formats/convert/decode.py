"""Reads a quantised checkpoint: converts it to BF16 files, or loads it tensor by tensor into a model.

The checkpoint's ``quantization_config`` determines the installed format that reads it. A weight is quantised if all tensors that the format
stores are present; other tensors are unchanged. If the family's BF16 checkpoints store experts in one tensor, the experts are joined again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from miles_core.checkpoint.hf_files import CheckpointFiles, Entry
from miles_core.errors import CheckpointError
from miles_core.precision.format import Format
from miles_core.precision.schedule import PLAIN
from miles_formats.convert.conversion import Conversion, Item, Job, Piece, check_finite, copy_pieces
from miles_formats.convert.installed import recognise
from miles_formats.convert.joined_experts import Joined, put_together
from miles_formats.convert.json_files import other_files, plain_files, quantization_block
from miles_formats.convert.writer import Target, Write
from miles_formats.fused_experts import Family


class QuantizedFiles:
    """A quantised checkpoint with the tensor names of the unquantised model ("plain names").

    Attributes:
        format: the number format.
        shapes: plain name -> shape, in file order.
        encoded: plain name -> suffix -> stored tensor, for quantised weights.
        joined: tensors of the BF16 checkpoint that consist of several of these.

    Raises:
        CheckpointError: no installed format recognises it, a part of a weight is missing, or the shapes of parts do not fit.
    """

    def __init__(self, files: CheckpointFiles, format: Format) -> None:
        self.files, self.format = files, format
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.encoded: dict[str, dict[str, Entry]] = {}
        suffixes = format.suffixes()
        for name, entry in files.entries.items():
            stem, _, suffix = name.rpartition(".")
            parts = {s: files.entries[f"{stem}.{s}"] for s in suffixes if f"{stem}.{s}" in files.entries}
            if suffix not in suffixes or set(parts) == {"weight"}:
                self.shapes[name] = entry.shape
            elif len(parts) < len(suffixes):
                lost = next(s for s in suffixes if s not in parts)
                raise CheckpointError(
                    f"{name} is in {entry.file}, but {stem}.{lost} is nowhere in the checkpoint: a weight in "
                    f"{format.name} needs both; copy the checkpoint again"
                )
            elif f"{stem}.weight" not in self.encoded:
                self._add(stem, parts)
        if not self.encoded:
            raise CheckpointError(
                f"{files.directory}: its configuration says {format.name}, but no tensor is stored so (a weight has "
                f"{' and '.join(suffixes)})"
            )
        self.joined = put_together(self.shapes, Family.of(files.config))

    def _add(self, stem: str, parts: dict[str, Entry]) -> None:
        found = {s: e.shape for s, e in parts.items()}
        shape = self.format.shape_of(found)
        if shape is None:
            raise CheckpointError(
                f"{stem}: no weight in {self.format.name} is stored as tensors of these shapes: "
                + ", ".join(f"{s} {list(v)}" for s, v in found.items())
            )
        self.encoded[f"{stem}.weight"] = parts
        self.shapes[f"{stem}.weight"] = shape

    def read(self, name: str) -> Tensor:
        """Return a tensor by its plain name: dequantised to FP32, or unchanged if it is not quantised."""
        if name not in self.encoded:
            return self.files.read(name)
        value = self.format.dequantize({s: self.files.read(e.name) for s, e in self.encoded[name].items()})
        check_finite(name, value)
        return value

    def nbytes(self, name: str) -> int:
        """Return the stored bytes of a tensor."""
        parts = self.encoded.get(name)
        return sum(e.nbytes for e in parts.values()) if parts else self.files.entries[name].nbytes

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the unquantised checkpoint, floating-point tensors in ``dtype``, with joined experts."""
        inside = {m for joined in self.joined for group in joined.members for m in group}
        for name in self.shapes:
            if name not in inside:
                tensor = self.read(name)
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
        for joined in self.joined:
            yield joined.name, torch.stack([self.slab(joined, e, dtype) for e in range(len(joined.members))])

    def slab(self, joined: Joined, expert: int, dtype: torch.dtype) -> Tensor:
        """Return one expert of a joined tensor."""
        return joined.slab([self.read(m).to(dtype) for m in joined.members[expert]])


def open_quantized(directory: Path | str, flag: str = "--model-dir") -> QuantizedFiles | None:
    """Open the quantised checkpoint in ``directory``; None if it is not quantised."""
    files = CheckpointFiles(directory, flag)
    block = quantization_block(files.directory, files.config)
    return None if block is None else QuantizedFiles(files, recognise(block, f"{flag} {directory}"))


def to_bf16(source: QuantizedFiles) -> Conversion:
    """Plan the conversion of a quantised checkpoint to BF16; unquantised tensors keep their dtype."""
    files = source.files
    jobs, items = [], []
    joined = {m: j for j in source.joined for group in j.members for m in group}
    seen = set()
    for name, shape in source.shapes.items():
        before = source.nbytes(name)
        whole = joined.get(name)
        if name in source.encoded or whole is not None:
            after = 2 * torch.Size(shape).numel()
            items.append(Item(name, shape, "" if name in source.encoded else "not quantised", before, after))
        else:
            items.append(Item(name, shape, "not quantised", before, before))
        if whole is None:
            jobs.append(_job(source, name))
        elif whole.name not in seen:
            seen.add(whole.name)
            jobs.append(_joined_job(source, whole))
    texts = plain_files(files.config)
    return Conversion(PLAIN, files, jobs, items, texts, other_files(files.directory))


def _job(source: QuantizedFiles, name: str) -> Job:
    entry = source.files.entries.get(name)
    if name not in source.encoded:
        assert entry is not None
        return Job([Target(name, entry.dtype, entry.shape)], copy_pieces(source.files, name), entry.nbytes)

    def decode() -> list[Write]:
        return [Write(name, source.read(name).to(torch.bfloat16))]

    return Job([Target(name, torch.bfloat16, source.shapes[name])], [decode], source.nbytes(name))


def _joined_job(source: QuantizedFiles, joined: Joined) -> Job:
    target = Target(joined.name, torch.bfloat16, joined.shape)
    size = target.nbytes // joined.shape[0]

    def one(expert: int) -> Piece:
        return lambda: [Write(joined.name, source.slab(joined, expert, torch.bfloat16), expert * size)]

    before = sum(source.nbytes(m) for group in joined.members for m in group)
    return Job([target], [one(e) for e in range(joined.shape[0])], before)
