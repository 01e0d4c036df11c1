"""What an embedded engine does with the model of one policy, except generating: weights, scores and facts."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.contracts.engine import Engine, check_scored
from miles_core.data.weight_unit import Encoded
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format, Stored
from miles_core.precision.quantizer import FormatItself
from miles_embedded.engine.runner import Runner, chunks
from miles_embedded.engine.settings import Settings
from miles_embedded.engine.weights import Weights
from miles_embedded.model.load import context_limit, facts_of
from miles_embedded.model.nonfinite import first_nonfinite
from miles_embedded.model.views import Loader
from miles_embedded.model.vision import Item
from miles_embedded.quantized.linear import linear_shapes


class ServedModel(Engine):
    """An engine's model on its device, as prepared by ``miles_embedded.model.load``.

    Attributes:
        paused: whether requests wait for ``resume``.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.max_context = context_limit(model, settings.max_context)
        self.kv_cache_dtype = settings.kv_cache_dtype
        self.runner = Runner(model, settings.kv_cache_dtype, settings.processor)
        self._weights = Weights(model, settings.codec, settings.products, settings.codec_of, self._invalidate_weights)
        self.paused = False

    @abstractmethod
    def _invalidate_weights(self) -> None:
        """Invalidate state that depends on the weights, which changed or will change."""

    @abstractmethod
    def _require_idle(self, what: str) -> None:
        """RuntimeError if unpaused requests are in flight, which ``what`` would affect."""

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def codec(self) -> Codec:
        """Codec that decodes incoming weights."""
        return self._weights.codec

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, media: Sequence[Item] = ()
    ) -> list[np.ndarray]:
        check_scored(sequences, self.max_context)
        results: dict[int, np.ndarray] = {}
        for chunk in chunks([len(s) for s in sequences]):
            self._weights.check()
            scored = self.runner.score([sequences[i] for i in chunk], temperature, [media[i] for i in chunk if media])
            results.update(zip(chunk, scored, strict=True))
            await asyncio.sleep(0)
        return [results[i] for i in range(len(sequences))]

    def find_nonfinite(self, sequences: Sequence[Sequence[int]]) -> str:
        """Describe the first value that is not finite when the model scores these sequences; "" if there is none."""
        return first_nonfinite(self.model, lambda: self.runner.score(sequences, 1.0))

    async def update_weights(self, units: Iterable[Encoded], version: int) -> None:
        self._require_idle("update_weights")
        self._weights.update(units, version)

    def reserve(self, name: str, stored: Mapping[str, Stored]) -> Mapping[str, Tensor]:
        return self._weights.inputs.reserve(name)

    async def share_weights(self, units: Iterable[Encoded], version: int) -> int:
        self._require_idle("share_weights")
        return self._weights.update(units, version, share=True)

    async def receive(self, message: Mapping[str, Any], version: int, last: bool) -> None:
        if not message.get("staged"):
            self._require_idle("receive")
        await self._weights.arrivals.receive(message, version, last)

    def quantizer(self, format: Format) -> FormatItself:
        """Return the format's own quantizer; this engine defines no other code."""
        return FormatItself(format, self.settings.products.of(format, self.model), linear_shapes(self.model))

    @property
    def native_products(self) -> bool:  # type: ignore[override]
        return bool(self._weights.inputs.layers)

    def emulated_products(self) -> AbstractContextManager[None]:
        return self._weights.inputs.emulate()

    def model_facts(self) -> Mapping[str, Any]:
        return facts_of(self.model)

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        return Loader(self.model).dtypes()

    async def weight_checksums(self, names: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        return {"": self._weights.checksums(names)}

    def weight_tensors(self) -> Iterable[Tensor]:
        return self._weights.tensors()
