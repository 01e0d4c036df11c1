"""The weights of the engine: their version, whether they are complete, and how updates arrive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miles_core.data.weight_unit import Encoded
from miles_core.errors import MilesError
from miles_core.precision.codec import Codec
from miles_core.precision.format import Parts
from miles_core.precision.products import Products
from miles_embedded.model.load_units import RepeatedUpdate, Update
from miles_embedded.model.onednn import Packs
from miles_embedded.model.parts import all_modules
from miles_embedded.model.released import Released
from miles_embedded.model.storage import codes_of, constant_tensors, is_constant
from miles_embedded.model.views import Loader
from miles_embedded.quantized.activation import RoundedInputs
from miles_embedded.quantized.repeated_codes import RepeatedCodes
from miles_workers.transport.arrivals import Arrival, Arrivals
from miles_workers.transport.sent_weights import Checksums, Kind, allocate_values

#: Bytes of values that are decoded together for their checksums.
_DECODED = 1 << 28


class Weights:
    """The weights of one model, decoded, or as codes only where a native product reads them. A precision determines how incoming weights
    are decoded and how products round their inputs.

    Args:
        model: the engine's module.
        codec: decodes encoded weights.
        products: how quantised layers multiply.
        codec_of: precision -> codec; None if the precision is fixed.
        changed: called when the weights changed or are about to change.

    Attributes:
        codec: decodes encoded weights.
        inputs: rounds the inputs of products.
        version: version of the last complete update; -1 before the first.
        complete: whether the model consists of exactly one version.
        packs: packed copies of some weights that are faster to read.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: Codec,
        products: Products,
        codec_of: Callable[[str], Codec] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.products = model, products
        self.version = -1
        self.complete = True
        self.packs = Packs()
        self._codec_of, self._changed = codec_of, changed
        self._set_codec(codec)
        self._shared: set[str] = set()
        self._arrivals: Arrivals | None = None
        self._released: tuple[Released, Released] | None = None
        self._last: RepeatedUpdate | None = None

    @property
    def arrivals(self) -> Arrivals:
        """Receives updates that arrive in buckets."""
        if self._arrivals is None:
            self._arrivals = Arrivals(
                lambda version, staged: (_StagedArrival if staged else _DirectArrival)(self, version)
            )
        return self._arrivals

    def check(self) -> None:
        """Check that the model can be run.

        Raises:
            MilesError: its weights are incomplete.
        """
        if not self.complete:
            raise MilesError(
                "the engine has no complete weights (an update failed part-way, the layout changed, or they were put to sleep); it "
                "cannot generate or score until an update succeeds"
            )

    @torch.no_grad()
    def checksums(self, names: Sequence[str]) -> dict[str, int]:
        """Return the checksums of these tensors, see ``Engine.weight_checksums``."""
        self.check()
        loader, sums = self._loader(), Checksums()
        encoded: list[tuple[str, Parts, Kind]] = []
        nbytes = 0
        for name in names:
            view, parameter = loader.locate(name)
            if isinstance(parameter, DTensor) or (is_constant(parameter) and codes_of(parameter) is not None):
                continue
            codes = self.inputs.find_codes(view.name)
            if codes is None:
                sums.add(name, loader.slice(view), stays=True)
            else:
                encoded.append((name, codes, (view.size, parameter.dtype, parameter.device)))
                nbytes += math.prod(view.size) * parameter.itemsize
            if nbytes >= _DECODED:
                self._add_decoded(encoded, sums)
                nbytes = 0
        self._add_decoded(encoded, sums)
        return sums.read()

    def _loader(self) -> Loader:
        """Return the places of checkpoint tensors in the model: those of the last update if nothing moved."""
        return self._last.loader if self._last is not None and self._last.is_current() else Loader(self.model)

    def _add_decoded(self, encoded: list[tuple[str, Parts, Kind]], sums: Checksums) -> None:
        """Decode these tensors (name, codes, kind of values) together, and add them."""
        if encoded:
            values = allocate_values([kind for _, _, kind in encoded])
            self.inputs.format.dequantize_all([codes for _, codes, _ in encoded], values)
            for (name, _, _), value in zip(encoded, values, strict=True):
                sums.add(name, value, stays=True)
            encoded.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the model's products read, including the codes of native products."""
        for module in all_modules(self.model):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    codes = codes_of(tensor)
                    yield tensor
                    yield from () if codes is None else codes.tensors()
        yield from self.inputs.tensors()

    def release(self) -> None:
        """Free the memory of the parameters, except those shared with the trainer; an update must follow before they are read. Constant
        ones, which no update contains, wait in host memory."""
        self.complete, self._last = False, None
        self.packs.clear()
        if self._arrivals is not None:
            self._arrivals.drop()
        self.inputs.drop_all()
        if self._released is None:
            self._released = Released(keep=False), Released(keep=True)
        own = {name: p for name, p in self.model.named_parameters() if name not in self._shared}
        dropped, aside = self._released
        dropped.release(p for p in own.values() if not is_constant(p))
        aside.release(constant_tensors(own.values()))

    def restore(self) -> None:
        """Allocate the memory of the parameters again."""
        for part in self._released or ():
            part.restore()
        self._released = None

    def rebuild(self, precision: str) -> None:
        """Decode the following updates in another precision; the weights are incomplete until the next update."""
        if self._codec_of is None:
            raise RuntimeError("this engine was built without a way to make other codecs (Settings.codec_of)")
        self.inputs.remove()
        self._set_codec(self._codec_of(precision))
        self.complete, self._last = False, None
        self._changed()

    def update(self, units: Iterable[Encoded], version: int, share: bool = False) -> int:
        """Load a whole update; ``share`` as for ``Update``. Returns the number of copied bytes."""
        if self._arrivals is not None:
            self._arrivals.forget()
        last = self._last
        if last is None or share or not last.is_current():
            return self.load(units, version, share)
        if last.encoded:
            self.complete = False  # the sender may write codes in place while it is read, and fail
        different = last.find_difference(iter(units))
        if different is not None:
            return self.load(different, version)
        self.complete = False
        last.copy()
        self.serve(version)
        return last.nbytes

    def begin_update(self, share: bool = False) -> Update:
        """Start an update tensor by tensor. The weights are incomplete until it is finished and ``serve`` is called."""
        if self._released is not None:
            raise RuntimeError("the weights are asleep: wake them before an update")
        self.complete, self._last = False, None
        self.packs.clear()
        return Update(self.model, self.codec.decode, self._shared, share)

    def load(self, units: Iterable[Encoded], version: int, share: bool = False) -> int:
        """Load a whole update like ``update``, without discarding arrivals in buckets."""
        update = self.begin_update(share)
        native = self.inputs.layers or self.inputs.experts
        update.take(self.inputs.take_each(units) if native else units)
        copied = update.finish()
        self.serve(version)
        self._last = None if share else self._find_repeat(update)
        return copied

    def _find_repeat(self, update: Update) -> RepeatedUpdate | None:
        """Return a finished update for later ones, if all its tensors last."""
        codes = RepeatedCodes(self.inputs, update.units) if self.inputs.layers or self.inputs.experts else None
        return update.repeat(self.codec.decode_all, codes)

    def serve(self, version: int) -> None:
        """Mark the weights as complete with this version."""
        self.version, self.complete = version, True
        if self._shared:
            own = self.model.named_parameters()
            self._shared -= {name for name, p in own if codes_of(p) is not None and not is_constant(p)}
        self.packs.clear()
        self._changed()

    def _set_codec(self, codec: Codec) -> None:
        self.codec = codec
        product = self.products.of(codec.format, self.model)
        self.inputs = RoundedInputs(self.model, codec, product, codes_only=True)


class _DirectArrival(Arrival):
    """Loads an update into the model bucket by bucket."""

    def __init__(self, weights: Weights, version: int) -> None:
        self._weights, self._version, self._update = weights, version, weights.begin_update(share=True)

    async def take(self, units: Iterator[Encoded]) -> None:
        self._update.take(self._weights.inputs.take_each(units))
        _wait_for_gpu()

    async def finish(self) -> None:
        self._update.finish()
        self._weights.serve(self._version)


class _StagedArrival(Arrival):
    """Stores an update next to the model and loads it when it is complete."""

    def __init__(self, weights: Weights, version: int) -> None:
        self._weights, self._version, self._held = weights, version, list[Encoded]()

    async def take(self, units: Iterator[Encoded]) -> None:
        home = next(self._weights.model.parameters()).device
        for unit in units:
            if not unit.lasting:
                unit.parts = {name: tensor.to(home, copy=True) for name, tensor in unit.parts.items()}
            self._held.append(unit)
        _wait_for_gpu()

    async def finish(self) -> None:
        self._weights.load(self._held, self._version, share=True)


def _wait_for_gpu() -> None:
    """Synchronise with the current stream, because the sender reuses a bucket as soon as ``receive`` returns."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # only this stream: the next bucket may be arriving on others
