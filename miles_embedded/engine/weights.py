"""The engine's weights: which version they are, whether they are complete, and the ways in which new ones come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from miles_core.data.unit import Encoded
from miles_core.errors import MilesError
from miles_core.precision.codec import Codec
from miles_core.precision.product import Products
from miles_embedded.model.load_units import Update
from miles_embedded.model.onednn import Packs
from miles_embedded.model.released import Released
from miles_embedded.quantized.activation import RoundedInputs
from miles_transport.arrivals import Arrival, Arrivals


class Weights:
    """The weights of one model. They lie here as plain numbers, beside the codes of native products: a precision is how they
    are read, and how products read their inputs.

    Args:
        model: the engine's module.
        codec: reads encoded weights.
        products: how quantised layers multiply.
        codec_of: precision -> codec, where it may change.
        changed: called when the weights are other ones, or will be.

    Attributes:
        codec: reads encoded weights.
        inputs: how products read their inputs.
        version: of the last complete update; -1 before the first.
        complete: whether the model holds one version and nothing else.
        arrivals: takes updates that come in buckets.
        packs: copies of some of them that are faster to read.
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
        self._read_with(codec)
        self._shared: set[str] = set()
        self.arrivals = Arrivals(lambda version, staged: (_Beside if staged else _Into)(self, version))
        self._released = Released(keep=False)

    def check(self) -> None:
        """The model may be asked.

        Raises:
            MilesError: it does not hold one version and nothing else.
        """
        if not self.complete:
            raise MilesError(
                "the engine has no complete weights (an update failed part-way, its layout changed, or they slept); it cannot "
                "generate or score until an update succeeds"
            )

    def tensors(self) -> Iterator[Tensor]:
        """What the model's products read, codes of native ones included."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for layer in self.inputs.layers.values():
            yield from (layer.codes or {}).values()

    def sleep(self) -> None:
        """Give the memory of the model's parameters back, all but that of the trainer; an update must come before they are read."""
        self.complete = False
        self.packs.clear()
        self.arrivals.drop()
        self.inputs.drop(list(self.inputs.layers))
        self._released.release(p for name, p in self.model.named_parameters() if name not in self._shared)

    def wake(self) -> None:
        """Take the memory again."""
        self._released.restore()

    def rebuild(self, precision: str) -> None:
        """Read the next update, which has to come, in another precision."""
        if self._codec_of is None:
            raise RuntimeError("this engine was built without a way to make other codecs (Settings.codec_of)")
        self.inputs.remove()
        self._read_with(self._codec_of(precision))
        self.complete = False
        self._changed()

    def update(self, units: Iterable[Encoded], version: int, share: bool = False) -> int:
        """Take a whole update at once; ``share`` as for ``Update``. Returns how many bytes were copied."""
        self.arrivals.forget()
        return self.load(units, version, share)

    def begun(self, share: bool = False) -> Update:
        """An update of the model, tensor by tensor: until it is finished and ``serve`` is called, the model holds no version."""
        if self._released:
            raise RuntimeError("these weights sleep: wake them before they are updated")
        self.complete = False
        self.packs.clear()
        return Update(self.model, self.codec.decode, self._shared, share)

    def load(self, units: Iterable[Encoded], version: int, share: bool = False) -> int:
        """As ``update``, for an update that came in buckets."""
        update = self.begun(share)
        update.take(self.inputs.taking(units))
        copied = update.finish()
        self.serve(version)
        return copied

    def serve(self, version: int) -> None:
        """The model holds this version."""
        self.version, self.complete = version, True
        self.packs.clear()
        self._changed()

    def _read_with(self, codec: Codec) -> None:
        self.codec = codec
        self.inputs = RoundedInputs(self.model, codec, self.products.of(codec.format, self.model))


class _Into(Arrival):
    """Goes into the model bucket by bucket."""

    def __init__(self, weights: Weights, version: int) -> None:
        self._weights, self._version, self._update = weights, version, weights.begun(share=True)

    async def take(self, units: Iterator[Encoded]) -> None:
        self._update.take(self._weights.inputs.taking(units))
        _wait_for_gpu()

    async def finish(self) -> None:
        self._update.finish()
        self._weights.serve(self._version)


class _Beside(Arrival):
    """Is held beside the model until it is put in force."""

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
    """The sender writes over a bucket as soon as its ``receive`` returns."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # not those on which the next bucket may be coming
