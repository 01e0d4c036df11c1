"""Plans the conversion of a BF16 checkpoint to a number format.

The output has the tensors of the checkpoint, except that experts stored in one tensor are split if any of them is quantised. Weights that
the format encodes together are read together, even from different files. The codec rounds FP32 and FP16 weights to BF16 before quantising
them; all other tensors keep their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_core.checkpoint.hf_files import CheckpointFiles, Entry
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import CheckpointError, ConfigError
from miles_core.precision.codec import COPY
from miles_core.precision.format import Format, part_name
from miles_formats.codec import FormatCodec, find_coupled, kind_of
from miles_formats.convert.conversion import Conversion, Item, Job, Piece, copy_pieces
from miles_formats.convert.installed import recognise
from miles_formats.convert.json_files import (
    other_files,
    quantization_block,
    quantized_files,
    unquantized_modules,
)
from miles_formats.convert.shaped import Shape, ShapedFiles
from miles_formats.convert.writer import Target, Write
from miles_formats.fused_experts import Expert, Family, is_joined

_WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Weight:
    """A tensor of the output. ``expert``: the slice of ``entry`` that it contains; None if it is the whole tensor."""

    name: str
    shape: tuple[int, ...]
    entry: Entry
    expert: Expert | None = None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.entry.dtype.itemsize

    @property
    def slab(self) -> tuple[str, int]:
        """Weights with the same value are read at once."""
        return (self.entry.name, -1 if self.expert is None else self.expert.index)


def to_format(files: CheckpointFiles, codec: FormatCodec, shape: Shape | None = None) -> Conversion:
    """Plan the conversion of a checkpoint to the codec's format; ``shape`` describes the weights after plugins changed them.

    Raises:
        CheckpointError: the checkpoint is already quantised, joins experts in an unknown layout, or lacks a weight of a coupled pair.
        ConfigError: the format cannot store a weight, or a selector matches nothing.
    """
    format = codec.format
    _refuse_quantised(files)
    source = files if shape is None else ShapedFiles(files, codec, shape)
    weights = {w.name: w for w in _weights(source, codec)}
    shapes = {w.name: w.shape for w in weights.values()}
    notes = codec.check(shapes)
    reasons = {name: codec.reason(name, shape) for name, shape in shapes.items()}
    chosen = [name for name, reason in reasons.items() if reason is None]
    _refuse_unstorable(codec, chosen, shapes)
    wanted = set(chosen)
    if isinstance(source, ShapedFiles):
        jobs = _shaped_jobs(source, codec, weights, wanted)
    else:
        jobs = [_job(files, codec, unit, wanted) for unit in _units(codec, weights, wanted)]
    items = [Item(n, w.shape, reasons[n] or "", w.nbytes, _after(codec, w, reasons[n])) for n, w in weights.items()]
    rounded = sum(weights[name].entry.dtype != COPY for name in chosen)
    if rounded:
        notes.append(f"{rounded} weights are not stored in BF16 and are rounded to it first: BF16 is what is quantised")
    notes += _list_divided(shapes, wanted)
    notes += _cautions(format, chosen, shapes)
    if codec.family.joining and codec.family.joining.caution and any(w.expert for w in weights.values()):
        notes.append(codec.family.joining.caution)
    modules = unquantized_modules(shapes, chosen)
    texts = quantized_files(files.config, format, modules)
    made = Conversion(format.name, files, jobs, items, texts, other_files(files.directory, texts), notes)
    if isinstance(source, ShapedFiles):
        made.begin = source.begin
    return made


def _refuse_quantised(files: CheckpointFiles) -> None:
    block = quantization_block(files.directory, files.config)
    weights = [e for e in files.entries.values() if e.name.endswith(".weight") or is_joined(e.name, e.shape)]
    coded = next((e for e in weights if e.dtype not in _WIDE), None)
    if block is None and coded is None:
        return
    how = f"quant_method {block.get('quant_method', 'unnamed')!r} in its configuration" if block else ""
    how = how or (f"{coded.name} is {str(coded.dtype).removeprefix('torch.')}" if coded else "")
    raise CheckpointError(
        f"--model-dir {files.directory} is already quantised ({how}), and quantising twice would add errors: "
        f"{_way_back(block)} its BF16 weights"
    )


def _way_back(block: dict[str, Any] | None) -> str:
    try:
        recognise(block or {}, "")
    except CheckpointError:
        return "no installed number format reads it, so start from"
    return "convert it with --to bf16 first, or start from"


def _weights(files: CheckpointFiles | ShapedFiles, codec: FormatCodec) -> list[_Weight]:
    codec.settle({e.name: e.shape for e in files.entries.values()}, Family.of(files.config))
    found = []
    for entry in files.entries.values():
        experts = codec.experts(entry.name, entry.shape)
        found += [_Weight(x.name, x.shape, entry, x) for x in experts] or [_Weight(entry.name, entry.shape, entry)]
    return found


def _refuse_unstorable(codec: FormatCodec, chosen: list[str], shapes: dict[str, tuple[int, ...]]) -> None:
    assert codec.format is not None
    bad = [(n, why) for n in chosen if (why := codec.format.refuse((shapes[n][0], shapes[n][1]))) is not None]
    if bad:
        more = f" ({len(bad)} weights like this)" if len(bad) > 1 else ""
        name, why = bad[0]
        raise ConfigError(f"{name} {list(shapes[name])} cannot be stored as {codec.format.name}: {why}{more}")


def _cautions(format: Format, chosen: list[str], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Return the format's caution for the first weight that has one, with the number of such weights."""
    found = [(name, why) for name in chosen if (why := format.caution((shapes[name][0], shapes[name][1]))) is not None]
    if not found:
        return []
    more = f" ({len(found)} weights like this)" if len(found) > 1 else ""
    name, why = found[0]
    return [f"{name} {list(shapes[name])} as {format.name}: {why}{more}"]


def _list_divided(shapes: dict[str, tuple[int, ...]], chosen: set[str]) -> list[str]:
    """Return notes on fused projections (one matrix in engines) that are only partly quantised."""
    for name in shapes:
        if not name.endswith((".q_proj.weight", ".gate_proj.weight")):
            continue
        stem, first, _ = name.rsplit(".", 2)
        group = ("q_proj", "k_proj", "v_proj") if first == "q_proj" else ("gate_proj", "up_proj")
        members = [m for part in group if (m := f"{stem}.{part}.weight") in shapes]
        inside = [m for m in members if m in chosen]
        if inside and len(inside) < len(members):
            outside = next(m for m in members if m not in chosen)
            return [
                f"{inside[0]} is quantised and {outside} is not: engines that join the two refuse such a checkpoint"
            ]
    return []


def _units(codec: FormatCodec, weights: dict[str, _Weight], wanted: set[str]) -> list[list[_Weight]]:
    """Group weights that are read and encoded together, in the order of the checkpoint."""
    assert codec.format is not None
    units: dict[str, list[_Weight]] = {}
    by_slab: dict[tuple[str, int], list[_Weight]] = {}
    kinds = set(map(kind_of, weights))
    for weight in weights.values():
        by_slab.setdefault(weight.slab, []).append(weight)
    for weight in weights.values():
        if weight.name in units:
            continue
        members = find_coupled(codec.format, weight.name, kinds) if weight.name in wanted else []
        absent = next((m for m in members if m not in wanted), None)
        if absent is not None:
            how = "is left alone by a selector" if absent in weights else "is not in the checkpoint"
            raise CheckpointError(
                f"{weight.name}: {codec.format.name} encodes it together with {absent}, which {how}; quantise both or "
                "neither"
            )
        together = [weights[m] for m in members] or by_slab[weight.slab]
        for member in together:
            units[member.name] = together
    return list({id(unit): unit for unit in units.values()}.values())


def _job(files: CheckpointFiles, codec: FormatCodec, unit: list[_Weight], chosen: set[str]) -> Job:
    before = sum(w.nbytes for w in unit)
    if len(unit) == 1 and unit[0].expert is None and unit[0].name not in chosen:
        entry = unit[0].entry
        return Job([Target(entry.name, entry.dtype, entry.shape)], copy_pieces(files, entry.name), before)
    targets = [t for w in unit for t in _targets(codec, w, w.name in chosen)]
    return Job(targets, [_encode(files, codec, unit)], before)


def _shaped_jobs(source: ShapedFiles, codec: FormatCodec, weights: dict[str, _Weight], chosen: set[str]) -> list[Job]:
    """One job for each unit of the plugins' stream."""
    assert codec.format is not None

    def piece() -> list[Write]:
        return [Write(name, tensor) for e in codec.encode_unit(source.take()) for name, tensor in e.parts.items()]

    jobs, kinds = [], set(map(kind_of, weights))
    for unit in source.units:
        members = [w for w in weights.values() if w.entry.name in unit]
        names = {w.name for w in members}
        for name in names & chosen:
            coupled = find_coupled(codec.format, name, kinds)
            if absent := next((m for m in coupled if m not in names & chosen), None):
                raise CheckpointError(
                    f"{name}: {codec.format.name} encodes it together with {absent}, which is left alone or not in the same unit of the "
                    "plugins' wrap_weights; keep both in one WeightUnit"
                )
        targets = [t for w in members for t in _targets(codec, w, w.name in chosen)]
        jobs.append(Job(targets, [piece], sum(w.nbytes for w in members)))
    return jobs


def _encode(files: CheckpointFiles, codec: FormatCodec, unit: list[_Weight]) -> Piece:
    def piece() -> list[Write]:
        slabs: dict[tuple[str, int], Tensor] = {}
        tensors = {}
        for weight in unit:
            if weight.slab not in slabs:
                slabs[weight.slab] = files.read(
                    weight.entry.name, None if weight.expert is None else weight.expert.index
                )
            tensor = slabs[weight.slab]
            tensors[weight.name] = tensor if weight.expert is None else weight.expert.of(tensor)
        encoded = codec.encode_unit(WeightUnit(tensors))
        return [Write(name, tensor) for e in encoded for name, tensor in e.parts.items()]

    return piece


def _targets(codec: FormatCodec, weight: _Weight, chosen: bool) -> list[Target]:
    if not chosen or codec.format is None:
        return [Target(weight.name, weight.entry.dtype, weight.shape)]
    stored = codec.format.storage((weight.shape[0], weight.shape[1]))
    return [Target(part_name(weight.name, s.suffix), s.dtype, s.shape) for s in stored]


def _after(codec: FormatCodec, weight: _Weight, reason: str | None) -> int:
    return sum(t.nbytes for t in _targets(codec, weight, reason is None))
