"""Encodes the export stream with the run's number format, and decodes it.

The same codec serves the weight sync (trainer encodes, engine decodes) and the trainer's own fake-quantised forward,
so that both sides compute with the same codes. It quantises the BF16 model copy: a weight in another dtype is first rounded to
BF16, on every side. Weights are encoded again at every sync. Between syncs, only the places of weights and
codes may be kept (``repeat``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.errors import CheckpointError, ConfigError
from miles_core.precision.codec import COPY, Codec, Room, Shape, plain
from miles_core.precision.format import Format, Parts, Stored, part_name
from miles_formats.finite import Finite
from miles_formats.fused_experts import Expert, Family, is_joined, split_experts
from miles_formats.repeated import RepeatedEncoding
from miles_formats.selector import Selector

log = logging.getLogger(__name__)

#: Bytes of weights that are encoded together: the first batch, which is small so that the GPU is busy while the host prepares the next
#: one, and the maximum. The size doubles with each batch.
_FIRST, _MOST = 256 << 20, 2 << 30

#: Maximum bytes of weights that are encoded together into newly allocated memory.
_ANEW = 256 << 20


class FormatCodec(Codec):
    """Encodes units with a number format.

    Args:
        format: the number format.
        selector: selects the checkpoint tensors to which the format applies.

    Experts that a checkpoint stores in one tensor are split and encoded separately; ``settle`` sets the model family.
    """

    format: Format

    def __init__(self, format: Format, selector: Selector | None = None) -> None:
        self.format = format
        self.selector = selector or Selector(format.skip, format.skip_origin, format.only, format.only_origin)
        self.family = Family()
        self._apart = True
        self._checked = False
        #: every tensor of the model, if known; the stream of one rank may hold only a part of them
        self._model: Mapping[str, Shape] = {}
        self._quantises: dict[tuple[str, Shape], bool] = {}
        self._kinds: set[str] = set()  # of these tensors, and of the experts in the joined ones

    def settle(self, shapes: Mapping[str, Shape], family: Family) -> None:
        """Decide for a whole model whether its joined experts are split. If any of them is quantised, all are split, otherwise none,
        because an engine accepts only one naming scheme.

        Args:
            shapes: every tensor of the model's BF16 checkpoint; empty if unknown.
            family: the family's layout of joined experts.

        Raises:
            CheckpointError: see ``experts``.
        """
        self.family, self._model = family, shapes
        self._quantises.clear()
        self.selector.settle(shapes)
        experts = [x for name, shape in shapes.items() for x in self._experts(name, shape)]
        self._kinds = {kind_of(name) for name in (*shapes, *(x.name for x in experts))}
        self._apart = not experts or any(self.selector(x.name, x.shape) for x in experts)

    def experts(self, name: str, shape: Shape) -> list[Expert]:
        """Return the matrices as which a joined tensor is encoded; [] for any other tensor, which keeps its name.

        Raises:
            CheckpointError: the family's layout of joined experts is unknown, and no selector excludes them.
        """
        return self._experts(name, shape) if self._apart else []

    def reason(self, name: str, shape: Shape) -> str | None:
        """Return the reason why a tensor keeps its precision; None if it is quantised."""
        inside = [] if self._apart else self._experts(name, shape)
        return self.selector.reason(inside[0].name, inside[0].shape) if inside else self.selector.reason(name, shape)

    def quantises(self, name: str, shape: Shape) -> bool:
        """Return whether the format applies to a tensor that is encoded under its own name."""
        found = self._quantises.get((name, shape))
        if found is None:
            found = self._quantises[name, shape] = self.reason(name, shape) is None
        return found

    def encode(self, units: Iterable[WeightUnit], room: Room | None = None) -> Iterator[Encoded]:
        """Yield encoded tensors in the order of the stream.

        Args:
            units: the export stream.
            room: returns output tensors; called for each quantised weight just before encoding, or for several if they are encoded
                together.

        Raises:
            MilesError: a weight that holds NaN or Inf, or that the format cannot store; names the tensor. Some weights after it may
                have been yielded by then.
            ConfigError: a selector matches none of the model's tensors. This is checked before the first stream if the model's
                checkpoint is known, otherwise at the end of the stream, which must then contain the whole model.
        """
        seen: dict[str, Shape] = {}
        finite = Finite()
        if self._model:
            self.check(self._model)
        waiting = _Waiting()
        for unit in units:
            if not self._checked:
                seen |= {name: tuple(tensor.shape) for name, tensor in unit.tensors.items()}
            for part in self.parts(unit):
                together = self._batch_limit(part)
                if together:
                    waiting.add(part)
                if len(waiting) >= together or waiting.nbytes >= waiting.enough:
                    yield from self._encode_all(waiting, finite, room)
                if not together:
                    yield from self._encode(part, finite, room)
            if not unit.lasting:
                yield from self._encode_all(waiting, finite, room)
        yield from self._encode_all(waiting, finite, room)
        finite.look()
        if any(
            self.selector.eligible(name, shape) for name, shape in seen.items()
        ):  # else only a part of the model was sent
            self.check(seen)

    def check(self, shapes: Mapping[str, Shape]) -> list[str]:
        """Check the selectors against all tensors of the checkpoint, once; see ``Selector.check``. Logs and returns its notes."""
        notes = []
        if not self._checked:
            single: dict[str, Shape] = {}
            for name, shape in shapes.items():
                apart: dict[str, Shape] = {x.name: x.shape for x in self._experts(name, shape)}
                single |= apart or {name: shape}
            notes = self.selector.check(single)
            for note in notes:
                log.info("%s", note)
        self._checked = True
        return notes

    def parts(self, unit: WeightUnit) -> Iterator[WeightUnit]:
        """Split the joined experts of a unit; yield units whose tensors are encoded together."""
        if not any(is_joined(n, t.shape) for n, t in unit.tensors.items()):
            yield unit
            return
        rest = {}
        for name, tensor in unit.tensors.items():
            experts = self.experts(name, tuple(tensor.shape))
            for index, members in groupby(experts, lambda x: x.index):
                yield WeightUnit({x.name: x.of(tensor[index]) for x in members}, unit.lasting)
            if not experts:
                rest[name] = tensor
        if rest:
            yield WeightUnit(rest, unit.lasting)

    def repeat(self, units: Sequence[WeightUnit], encoded: Sequence[Encoded]) -> Callable[[], Iterator[Encoded]] | None:
        """See ``Codec.repeat``; None for formats with coupled weights."""
        if type(self) is not FormatCodec or self.format.couple:
            return None
        weights = {name: tensor for unit in units for part in self.parts(unit) for name, tensor in part.tensors.items()}
        return RepeatedEncoding(self.format, weights, encoded)

    def encode_unit(self, unit: WeightUnit) -> list[Encoded]:
        """Encode one unit's tensors, in its order. Each is first rounded to BF16; coupled weights share their statistics."""
        finite = Finite(all_stay=True)
        found = [encoded for part in self.parts(unit) for encoded in self._encode(part, finite)]
        finite.look()
        return found

    @torch.no_grad()
    def _encode(self, unit: WeightUnit, finite: Finite, room: Room | None = None) -> list[Encoded]:
        format, tensors = self.format, unit.tensors
        chosen = {n: t.to(COPY) for n, t in tensors.items() if self.quantises(n, tuple(t.shape))}
        for name, tensor in chosen.items():
            _check(format, name, tensor)
            if not format.shows:
                finite.add(name, tensor, stays=unit.lasting and tensor is tensors[name])
        stats = self._shared_stats(chosen, list(tensors))
        found = [_quantize(format, n, chosen[n], stats[n], room) if n in chosen else plain(unit, n) for n in tensors]
        for encoded in found if format.shows else ():
            if (name := encoded.name) in chosen:
                weight, shows = chosen[name], encoded.parts[part_name(name, format.shows)]
                finite.add(name, weight, unit.lasting and weight is tensors[name], shows)
        return found

    def _shared_stats(self, chosen: dict[str, Tensor], present: list[str]) -> dict[str, Tensor | None]:
        """Return each weight's statistics, reduced over its coupled weights: those of them that the model has."""
        format = self.format
        stats: dict[str, Tensor | None] = {name: format.stats(tensor) for name, tensor in chosen.items()}
        for name in chosen:
            members = find_coupled(format, name, self._kinds)
            absent = [m for m in members if m not in chosen]
            if absent:
                how = "is left alone by a selector" if absent[0] in present else "did not come with it"
                raise ConfigError(
                    f"{name}: {format.name} encodes it together with {absent[0]}, which {how}; quantise both or neither"
                )
            together = [s for s in (stats[m] for m in members) if s is not None]
            if len(together) > 1:
                joint = torch.stack(together).amax(0)
                stats.update(dict.fromkeys(members, joint))
        return stats

    def _batch_limit(self, unit: WeightUnit) -> int:
        """Return how many weights may be encoded in one batch with this unit; 0 if the unit is encoded on its own."""
        format = self.format
        if format.together == 1:
            return 0
        may = all(t.is_cuda and t.dtype == COPY and self.quantises(n, tuple(t.shape)) for n, t in unit.tensors.items())
        return format.together if may else 0

    def _encode_all(self, waiting: _Waiting, finite: Finite, room: Room | None) -> Iterator[Encoded]:
        """Encode all waiting weights in as few kernel launches as the format and the space in the buffer (``room``) allow."""
        format = self.format
        while waiting.weights:
            names, weights, outs = waiting.take(format, room)
            with torch.no_grad():
                parts = format.quantize_all(weights, outs)
            if format.shows:
                finite.add_all(names, weights, waiting.lasting, [part[format.shows] for part in parts])
            else:
                for name, weight in zip(names, weights, strict=True):
                    finite.add(name, weight, waiting.lasting)
            for name, part in zip(names, parts, strict=True):
                yield Encoded(name, name_parts(name, part), format.name)
        waiting.lasting = True

    def _experts(self, name: str, shape: Shape) -> list[Expert]:
        """Return the matrices in a joined tensor, whether or not it is split."""
        if not is_joined(name, shape):
            return []
        try:
            return split_experts(name, shape, self.family)
        except CheckpointError:
            if self.selector.spares(name, shape):
                return []
            raise

    def decode(self, encoded: Encoded) -> Tensor:
        if encoded.format != self.format.name:
            return super().decode(encoded)
        return self.format.dequantize(_suffixes(encoded))

    def decode_all(self, encoded: Sequence[Encoded], outs: Sequence[Tensor]) -> None:
        """Decode tensors of this codec to ``outs``, in as few kernel launches as the format allows."""
        quantized = [(each, out) for each, out in zip(encoded, outs, strict=True) if each.format]
        if quantized:
            self.format.dequantize_all([_suffixes(each) for each, _ in quantized], [out for _, out in quantized])
        for each, out in zip(encoded, outs, strict=True):
            if not each.format:
                out.copy_(each.parts[each.name])


def _suffixes(encoded: Encoded) -> Parts:
    """Return the parts of an encoded weight by suffix."""
    return {part.rpartition(".")[2]: tensor for part, tensor in encoded.parts.items()}


def name_parts(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename a format's parts from suffixes to stored names."""
    return {part_name(name, suffix): tensor for suffix, tensor in parts.items()}


class _Waiting:
    """Queue of weights in ``COPY`` to be encoded together, with their total bytes and the threshold ``enough``. ``lasting``: the memory
    of all of them stays unchanged."""

    def __init__(self) -> None:
        self.weights: list[tuple[str, Tensor]] = []
        self.lasting = True
        self.nbytes, self.enough = 0, _FIRST

    def __len__(self) -> int:
        return len(self.weights)

    def add(self, unit: WeightUnit) -> None:
        for name, tensor in unit.tensors.items():
            self.weights.append((name, tensor.detach()))
            self.nbytes += tensor.nbytes
        self.lasting &= unit.lasting

    def take(self, format: Format, room: Room | None) -> tuple[list[str], list[Tensor], list[Parts | None]]:
        """Remove the first weights from the queue and return them with their room: as many as have room, or one for which ``room`` has none;
        up to ``_ANEW`` bytes of weights for which new tensors are allocated."""
        outs: list[Parts | None] = []
        nbytes = 0
        for name, weight in self.weights:
            _check(format, name, weight)
            out, full = _room(format, name, weight, room)
            nbytes += weight.nbytes if out is None else 0
            if outs and (full or (out is None and nbytes > _ANEW)):
                break
            outs.append(out)
            if full:
                break
        taken, self.weights = self.weights[: len(outs)], self.weights[len(outs) :]
        self.nbytes -= sum([weight.nbytes for _, weight in taken])
        self.enough = min(2 * self.enough, _MOST)
        return [name for name, _ in taken], [weight for _, weight in taken], outs


def _quantize(format: Format, name: str, weight: Tensor, stats: Tensor | None, room: Room | None) -> Encoded:
    out, _ = _room(format, name, weight, room)
    return Encoded(name, name_parts(name, format.quantize(weight, stats, out)), format.name)


def _room(format: Format, name: str, weight: Tensor, room: Room | None) -> tuple[Parts | None, bool]:
    """Return the output tensors for a weight's parts, None to allocate new ones; and whether ``room`` has none left."""
    if room is None:
        return None, False
    stored = _name_stored(format, name, weight.shape[0], weight.shape[1])
    given = room(name, stored)
    return ({s.suffix: given[part] for part, s in stored.items()} if given else None), given is None


@lru_cache(1 << 16)
def _name_stored(format: Format, name: str, rows: int, columns: int) -> Mapping[str, Stored]:
    """Return the stored tensors of a weight by stored name; they are the same at every sync."""
    return {part_name(name, s.suffix): s for s in format.storage((rows, columns))}


def _check(format: Format, name: str, weight: Tensor) -> None:
    """Raise ConfigError if the format cannot store the weight."""
    why = format.refuse((weight.shape[0], weight.shape[1]))
    if why is not None:
        raise ConfigError(f"{name} {list(weight.shape)} cannot be stored as {format.name}: {why}")


def kind_of(name: str) -> str:
    """Return the name of a weight's module within its parent, such as ``gate_proj``."""
    return name.rpartition(".")[0].rpartition(".")[2]


def find_coupled(format: Format, name: str, kinds: Collection[str] = ()) -> list[str]:
    """Return the names of the weights that are encoded with ``name``, including itself; [] if it is encoded on its own.

    Args:
        kinds: ``kind_of`` every weight of the model; empty if unknown. If the first of a group is nowhere in the model, its experts have no
            gate, and ``up_proj`` is encoded on its own.
    """
    stem, _, leaf = name.rpartition(".")
    parent, _, last = stem.rpartition(".")
    group = next((group for group in format.couple if last in group), ())
    if group and kinds and group[0] not in kinds:
        return []
    return [f"{parent}.{member}.{leaf}" for member in group]
