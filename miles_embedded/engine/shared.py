"""One batch for the policies whose models are variants of one model.

``SharedBatch`` runs a model that holds the parts of all variants. Each policy has a ``SharedEngine`` with a model of its own, which receives
its weights and scores; its requests join the batch. A policy is paused and updated while the requests of the others continue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from torch import Tensor, nn

from miles_core.contracts.engine import PauseMode, Request, Response
from miles_core.errors import MilesError, PluginError, SyncError
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.served_model import ServedModel
from miles_embedded.engine.settings import Settings
from miles_embedded.model.storage import is_constant
from miles_embedded.model.variants import Variant


class SharedBatch(EmbeddedEngine):
    """The requests of several policies over one model.

    Args:
        model: another model of the same kind as those of the policies; its own parts are not used.
        settings: of all engines.
        variant: what marks the models.
    """

    def __init__(self, model: nn.Module, settings: Settings, variant: Variant) -> None:
        super().__init__(model, settings)
        self.parts = self.runner.parts = variant.gather(model)
        self.served = []

    def join(self, engine: ServedModel) -> int:
        """Add a policy; returns the index of its variant."""
        self.check(engine)
        free = (index for index, each in enumerate(self.served) if each is None)
        index = next(free, len(self.served))
        self.served[index : index + 1] = [engine]
        self.update(index)
        return index

    def check(self, engine: ServedModel) -> None:
        """Check that updates of a policy's model change its parts only.

        Raises:
            PluginError: they change a weight that all policies share.
        """
        own = dict(engine.model.named_parameters())
        for name, _ in self.model.named_parameters():
            if not is_constant(own[name]):
                raise PluginError(
                    f"{name} of a model that was marked as a variant (mark_variant) is updated, but other policies compute with it, too; "
                    "mark it as constant, or do not mark the model"
                )

    def leave(self, variant: int) -> None:
        """Remove a policy, whose requests have ended; frees the cache after the last one."""
        self.served[variant] = None
        self.invalidate(variant)
        if not any(self.served):
            self._clear()

    def update(self, variant: int) -> None:
        """Use the current parts of a policy's model for its rows."""
        engine = self.served[variant]
        assert engine is not None
        self.parts.put(variant, engine.model)
        self.invalidate(variant)

    def weight_tensors(self) -> Iterable[Tensor]:
        return chain(super().weight_tensors(), self.parts.tensors())


class SharedEngine(ServedModel):
    """The engine of one policy in a shared batch."""

    #: The cache belongs to all policies, and the layout of the weights, too.
    capabilities = EmbeddedEngine.capabilities - {"sleep", "rebuild"}

    def __init__(self, model: nn.Module, settings: Settings, batch: SharedBatch) -> None:
        super().__init__(model, settings)
        self.batch = batch
        self._variant = -1

    async def start(self) -> None:
        self.paused = False
        if self._variant < 0:
            self._variant = self.batch.join(self)

    async def stop(self) -> None:
        if self._variant >= 0:
            await self.pause("abort")
            self.batch.leave(self._variant)
            self._variant = -1

    async def generate(self, request: Request) -> Response:
        if self._variant < 0:
            raise RuntimeError("the engine was stopped; call start first")
        self._weights.check()
        return await self.batch.submit(request, self._variant)

    async def pause(self, mode: PauseMode = "abort") -> None:
        self.paused = True
        self.batch.hold(self._variant, mode)

    async def resume(self) -> None:
        self.paused = False
        try:
            self._weights.check()
        except MilesError as error:
            self.batch.end(self._variant, error=error)
        self.batch.wake_up()

    async def weight_checksums(self, names: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        if not self.batch.parts.holds(self._variant, self.model):
            raise SyncError("the shared batch computes with other weights than those that the policy's model received")
        return await super().weight_checksums(names)

    async def abort(self, keys: Collection[int] | None = None) -> None:
        self.batch.end(self._variant, keys)

    def _invalidate_weights(self) -> None:
        if self._variant >= 0:
            self.batch.update(self._variant)

    def _require_idle(self, what: str) -> None:
        requests = self.batch.requests(self._variant)
        if requests and not self.paused:
            raise RuntimeError(f"{what} with {len(requests)} requests in flight: pause or abort them first")
