"""Encoding the export stream with the run's number format, and reading it back.

The same codec serves the weight sync (trainer encodes, engine decodes) and the trainer's own fake-quantised forward,
so both sides compute with the same codes. What is quantised is the BF16 model copy: a weight held in another dtype is rounded
to BF16 here, for every side. Weights are encoded again at every sync; nothing is kept between two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from miles_core.data.unit import Encoded, Unit
from miles_core.errors import CheckpointError, ConfigError
from miles_core.precision.finite import Finite
from miles_core.precision.format import Format, Parts, Stored, part_name
from miles_core.precision.fused_experts import Expert, Family, is_joined, take_apart
from miles_core.precision.selector import Selector, Shape

log = logging.getLogger(__name__)

#: The model copy's dtype: what every number format quantises, whatever dtype a weight is held or stored in.
COPY = torch.bfloat16

#: Bytes of weights that are encoded together: those that a GPU is given first, so that it is busy while the host finds the next ones, and at
#: most; twice as many each time.
_FIRST, _MOST = 256 << 20, 2 << 30

#: Bytes of weights that are encoded together into new memory, at most.
_ANEW = 256 << 20

#: Where a weight's codes are to be written: stored name -> tensor; None makes new tensors. Given its name and what it is stored as.
Room = Callable[[str, Mapping[str, Stored]], dict[str, Tensor] | None]


class Codec:
    """Encodes units for the engine and decodes them on the other side.

    Args:
        format: the number format; None sends every tensor as it is.
        selector: which checkpoint tensors the format applies to.

    Experts that a checkpoint has in one tensor are taken apart and encoded one by one; ``settle`` says whose they are.
    """

    def __init__(self, format: Format | None = None, selector: Selector | None = None) -> None:
        self.format = format
        if selector is None:
            selector = Selector()
            if format is not None:
                selector = Selector(format.skip, format.skip_origin, format.only, format.only_origin)
        self.selector = selector
        self.family = Family()
        self._apart = True
        self._checked = False
        #: every tensor of the model, where it is known: one rank's stream may hold a part of them
        self._model: Mapping[str, Shape] = {}

    def settle(self, shapes: Mapping[str, Shape], family: Family) -> None:
        """Decide for a whole model whether its joined experts are taken apart: all are when any is quantised, none
        otherwise, because an engine that has seen one kind of name reads no other.

        Args:
            shapes: every tensor of the model's checkpoints as they are stored in BF16; none when they are not known.
            family: how they join experts.

        Raises:
            CheckpointError: see ``experts``.
        """
        self.family, self._model = family, shapes
        self.selector.settle(shapes)
        if self.format is None:
            return
        experts = [x for name, shape in shapes.items() for x in self._experts(name, shape)]
        self._apart = not experts or any(self.selector(x.name, x.shape) for x in experts)

    def experts(self, name: str, shape: Shape) -> list[Expert]:
        """The matrices that a joined tensor is encoded as; none for any other tensor, which keeps its name.

        Raises:
            CheckpointError: nobody knows how the family joins experts, and they are not left alone.
        """
        return self._experts(name, shape) if self._apart else []

    def reason(self, name: str, shape: Shape) -> str | None:
        """Why a tensor keeps its precision; None when it is quantised."""
        inside = [] if self._apart else self._experts(name, shape)
        return self.selector.reason(inside[0].name, inside[0].shape) if inside else self.selector.reason(name, shape)

    def quantises(self, name: str, shape: Shape) -> bool:
        """Whether the format applies to a tensor, of those that are encoded under a name of their own."""
        return self.reason(name, shape) is None

    def encode(self, units: Iterable[Unit], room: Room | None = None) -> Iterator[Encoded]:
        """Encoded tensors in the order of the stream.

        Args:
            units: the export stream.
            room: asked for each weight that is quantised, just before; for several where they are encoded together.

        Raises:
            MilesError: a weight that holds NaN or Inf, or that the format cannot store; names the tensor. Some weights after it may
                have been yielded by then.
            ConfigError: a selector that matches none of the model's tensors; before the first stream where the model's
                checkpoint is known, else at its end, and then the stream must be the whole model's.
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
                together = self._together(part)
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
        self.check(seen)

    def check(self, shapes: Mapping[str, Shape]) -> list[str]:
        """Hold the selectors against all tensors of the checkpoint, once; see ``Selector.check``. Returns its notes,
        which are logged too."""
        notes = []
        if self.format is not None and not self._checked:
            single: dict[str, Shape] = {}
            for name, shape in shapes.items():
                apart: dict[str, Shape] = {x.name: x.shape for x in self._experts(name, shape)}
                single |= apart or {name: shape}
            notes = self.selector.check(single)
            for note in notes:
                log.info("%s", note)
        self._checked = True
        return notes

    def parts(self, unit: Unit) -> Iterator[Unit]:
        """The unit with joined experts apart: what is encoded together."""
        if self.format is None or not any(is_joined(n, t.shape) for n, t in unit.tensors.items()):
            yield unit
            return
        rest = {}
        for name, tensor in unit.tensors.items():
            experts = self.experts(name, tuple(tensor.shape))
            for index, members in groupby(experts, lambda x: x.index):
                yield Unit({x.name: x.of(tensor[index]) for x in members}, unit.lasting)
            if not experts:
                rest[name] = tensor
        if rest:
            yield Unit(rest, unit.lasting)

    def encode_unit(self, unit: Unit) -> list[Encoded]:
        """One unit's tensors, in its order; each is rounded to BF16 before, coupled weights share their statistics."""
        finite = Finite(all_stay=True)
        found = [encoded for part in self.parts(unit) for encoded in self._encode(part, finite)]
        finite.look()
        return found

    def _encode(self, unit: Unit, finite: Finite, room: Room | None = None) -> list[Encoded]:
        if self.format is None:
            return [_plain(unit, name) for name in unit.tensors]
        return self._coded(self.format, unit, finite, room)

    @torch.no_grad()
    def _coded(self, format: Format, unit: Unit, finite: Finite, room: Room | None) -> list[Encoded]:
        tensors = unit.tensors
        chosen = {n: t.to(COPY) for n, t in tensors.items() if self.quantises(n, tuple(t.shape))}
        for name, tensor in chosen.items():
            _check(format, name, tensor)
            if not format.shows:
                finite.add(name, tensor, stays=unit.lasting and tensor is tensors[name])
        stats = _shared_stats(format, chosen, list(tensors))
        found = [_quantized(format, n, chosen[n], stats[n], room) if n in chosen else _plain(unit, n) for n in tensors]
        for encoded in found if format.shows else ():
            if (name := encoded.name) in chosen:
                weight, shows = chosen[name], encoded.parts[part_name(name, format.shows)]
                finite.add(name, weight, unit.lasting and weight is tensors[name], shows)
        return found

    def _together(self, unit: Unit) -> int:
        """How many weights, a unit's among them, are encoded at once; 0 where it is not to wait for others."""
        format = self.format
        if format is None or format.together == 1:
            return 0
        may = all(t.is_cuda and t.dtype == COPY and self.quantises(n, tuple(t.shape)) for n, t in unit.tensors.items())
        return format.together if may else 0

    def _encode_all(self, waiting: _Waiting, finite: Finite, room: Room | None) -> Iterator[Encoded]:
        """What waits, in as few launches as the format makes, and as there is room; nothing waits then."""
        format = self.format
        while waiting.weights and format is not None:
            names, weights, outs = waiting.take(format, room)
            with torch.no_grad():
                parts = format.quantize_all(weights, outs)
            if format.shows:
                finite.add_all(names, weights, waiting.lasting, [part[format.shows] for part in parts])
            else:
                for name, weight in zip(names, weights, strict=True):
                    finite.add(name, weight, waiting.lasting)
            for name, part in zip(names, parts, strict=True):
                yield Encoded(name, named(name, part), format.name)
        waiting.lasting = True

    def _experts(self, name: str, shape: Shape) -> list[Expert]:
        """What is in a joined tensor, whether or not it is taken apart."""
        if self.format is None or not is_joined(name, shape):
            return []
        try:
            return take_apart(name, shape, self.family)
        except CheckpointError:
            if self.selector.spares(name, shape):
                return []
            raise

    def decode(self, encoded: Encoded) -> Tensor:
        """The values an encoded tensor stands for: FP32, or the tensor itself where it travels as it is."""
        if not encoded.format:
            return encoded.parts[encoded.name]
        if self.format is None or encoded.format != self.format.name:
            mine = f"for {self.format.name}" if self.format else "without a number format"
            raise ConfigError(
                f"{encoded.name} arrived as {encoded.format}, but this engine was built {mine}; trainer and engine "
                "must be started with the same --rollout-precision"
            )
        return self.format.dequantize({part.rpartition(".")[2]: t for part, t in encoded.parts.items()})


def named(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """A format's parts under the names they are stored by."""
    return {part_name(name, suffix): tensor for suffix, tensor in parts.items()}


def _plain(unit: Unit, name: str) -> Encoded:
    return Encoded(name, {name: unit.tensors[name]}, lasting=unit.lasting)


class _Waiting:
    """Weights in ``COPY`` to be encoded together, so many bytes, which are ``enough`` at some number. ``lasting``: all of them stay as they are."""

    def __init__(self) -> None:
        self.weights: list[tuple[str, Tensor]] = []
        self.lasting = True
        self.nbytes, self.enough = 0, _FIRST

    def __len__(self) -> int:
        return len(self.weights)

    def add(self, unit: Unit) -> None:
        for name, tensor in unit.tensors.items():
            self.weights.append((name, tensor.detach()))
            self.nbytes += tensor.nbytes
        self.lasting &= unit.lasting

    def take(self, format: Format, room: Room | None) -> tuple[list[str], list[Tensor], list[Parts | None]]:
        """The first of them, with their room: as many as there is room for, or one for which there is none; without any room as many as
        take no more than ``_ANEW`` bytes."""
        outs: list[Parts | None] = []
        nbytes = 0
        for name, weight in self.weights:
            _check(format, name, weight)
            out, nbytes = _room(format, name, weight, room), nbytes + weight.nbytes
            if outs and out is None and (room is not None or nbytes > _ANEW):
                break
            outs.append(out)
            if out is None and room is not None:
                break
        taken, self.weights = self.weights[: len(outs)], self.weights[len(outs) :]
        self.nbytes -= sum([weight.nbytes for _, weight in taken])
        self.enough = min(2 * self.enough, _MOST)
        return [name for name, _ in taken], [weight for _, weight in taken], outs


def _quantized(format: Format, name: str, weight: Tensor, stats: Tensor | None, room: Room | None) -> Encoded:
    return Encoded(name, named(name, format.quantize(weight, stats, _room(format, name, weight, room))), format.name)


def _room(format: Format, name: str, weight: Tensor, room: Room | None) -> Parts | None:
    """Where a weight's parts are to be written; None is anywhere."""
    if room is None:
        return None
    stored = _stored(format, name, weight.shape[0], weight.shape[1])
    given = room(name, stored)
    return None if given is None else {s.suffix: given[part] for part, s in stored.items()}


@lru_cache(1 << 16)
def _stored(format: Format, name: str, rows: int, columns: int) -> Mapping[str, Stored]:
    """What a weight is stored as, under which names: the same at every sync."""
    return {part_name(name, s.suffix): s for s in format.storage((rows, columns))}


def _check(format: Format, name: str, weight: Tensor) -> None:
    """Refuse what the format cannot store."""
    why = format.refuse((weight.shape[0], weight.shape[1]))
    if why is not None:
        raise ConfigError(f"{name} {list(weight.shape)} cannot be stored as {format.name}: {why}")


def _shared_stats(format: Format, chosen: dict[str, Tensor], present: list[str]) -> dict[str, Tensor | None]:
    """Each weight's statistics, reduced over the weights it is coupled with."""
    stats: dict[str, Tensor | None] = {name: format.stats(tensor) for name, tensor in chosen.items()}
    for name in chosen:
        members = coupled(format, name)
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


def coupled(format: Format, name: str) -> list[str]:
    """Names of the weights that are encoded with ``name``, itself included; empty when it stands alone."""
    stem, _, leaf = name.rpartition(".")
    parent, _, last = stem.rpartition(".")
    group = next((group for group in format.couple if last in group), ())
    return [f"{parent}.{member}.{leaf}" for member in group]
