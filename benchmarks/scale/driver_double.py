"""A runtime whose engine and trainer cost nothing, to measure the driver: responses arrive as messages of another process.

A single-file plugin (``--plugins benchmarks/scale/driver_double.py --runtime driver_double``). The engine's response is unpickled, and its large
arrays are views of the message, as Ray delivers them from shared memory. With ``--rollout-workers`` a worker receives it, as it does from
an engine in another process. The trainer's share is serialized for another process of this machine; its arrays are copied to shared
memory, unless it refers to memory of a worker. The environment variable ``DRIVER_TOKENS`` is the number of tokens of a response, and
``DRIVER_ROUTES`` the number of layers with a routing record of 8 of 128 experts (``r3``), or 0.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Collection
from typing import Any

import numpy as np

from miles_core.data import Field
from miles_core.engine import Engine, Response, SyncReport
from miles_core.plugin import InlineRuntime, Plugin, PolicyParts, Runtime, hookimpl
from miles_core.precision.schedule import precisions
from miles_core.trainer import Learned, LearnerHandle
from miles_workers import Workers, local_channel
from miles_workers.engine_pool import EnginePool
from miles_workers.inbox import Inbox
from miles_workers.inline_rollouts import InlineRolloutRuntime
from miles_workers.object_ref import ObjectRef, write_buffers

#: As the field of ``r3``, whose hook checks it in the same way.
FIELD = Field("recorded", "int16", "token-1", pad=-1, shape=(None, None))


def layers() -> int:
    """Return the number of layers whose routes are recorded."""
    return int(os.environ.get("DRIVER_ROUTES", "0"))


class Hooks:
    """What ``r3`` does in the driver."""

    @hookimpl
    def on_request(self, request: Any) -> None:
        if layers():
            request.extras.add(FIELD.name)

    @hookimpl
    def on_sample(self, sample: Any) -> None:
        if layers():
            assert int(np.asarray(sample.fields[FIELD.name]).max()) < 128


plugin = Plugin(
    name="driver_double",
    summary="engine and trainer that cost nothing",
    version="1",
    core=">=0",
    provides={"runtime": {"driver_double": "make_runtime"}},
    capabilities={"runtime": ("rollout_workers",)},
    hooks={"": f"{__name__}:Hooks"},
    fields=(FIELD,),
)


class Message:
    """A pickled object with its large arrays next to it."""

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        self.data = pickle.dumps(value, 5, buffer_callback=buffers.append)
        self.buffers = [bytearray(buffer) for buffer in buffers]

    def read(self) -> Any:
        """Unpickle it; arrays are views."""
        return pickle.loads(self.data, buffers=self.buffers)


class DoubleEngine(Engine):
    """Answers every request with the same message."""

    capabilities = frozenset({"keyed_sampling"})

    def __init__(self) -> None:
        self._version, self.size = -1, int(os.environ["DRIVER_TOKENS"])
        self._answers: dict[int, Message] = {}

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def generate(self, request: Any) -> Response:
        prompt, size = len(request.tokens), self.size
        if prompt not in self._answers:
            random = np.random.default_rng(0)
            rows = random.integers(0, 128, (prompt + size - 1, layers(), 8), np.int16) if layers() else None
            tokens = random.integers(3, 30, size).tolist()
            made = Response(tokens, (-random.exponential(1.0, size)).tolist(), "length", "a" * size, [(0, 0)])
            made.extras = {} if rows is None else {FIELD.name: rows}
            self._answers[prompt] = Message(made)
        await asyncio.sleep(0)
        return self._answers[prompt].read()

    async def score(self, sequences: Any, temperature: float = 1.0, media: Any = ()) -> Any:
        raise NotImplementedError

    async def update_weights(self, units: Any, version: int) -> None:
        self._version = version

    async def pause(self, mode: Any = "abort") -> None: ...

    async def abort(self, keys: Collection[int] | None = None) -> None: ...

    async def resume(self) -> None: ...


class DoubleEngines(Workers):
    """An engine in another process, which every process has for itself."""

    def __init__(self) -> None:
        super().__init__(["engine-0"])
        self.engine = DoubleEngine()
        self._inboxes: dict[str, Inbox] = {}

    async def send(self, number: int, method: str, *args: Any) -> Any:
        if method in ("post", "answers"):
            inbox = self._inboxes.setdefault(args[0], Inbox(self.engine.generate))
            return inbox.post(args[1]) if method == "post" else await inbox.answers()
        if method == "update":
            await self.engine.update_weights((), args[1])
        return self.engine.version if method == "version" else None

    async def restart(self, number: int) -> None: ...

    async def kill(self, number: int) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return DoubleEngines, ()


class DoubleLearner(LearnerHandle):
    """Sends the shares of two replicas and receives references to what training recorded."""

    def __init__(self, run: Any, engine: Engine) -> None:
        super().__init__(run, run.policy)
        self.engine = engine
        self._seen: dict[int, ObjectRef] = {}

    async def learn(self, samples: Any, step: int) -> Learned:
        from miles_core.contracts.runtime import TrainedTokens
        from miles_core.train.data_shard import merge_recorded, split_by_replica
        from miles_workers.remote_tokens import pack_tokens, refer_tokens
        from miles_workers.sample_list import pack_shard

        shares = split_by_replica(samples, self.run.config.train, 2)
        for share in shares:
            sent = local_channel.Message(pack_shard(share))
            if sent.buffers:
                os.close(write_buffers(sent.buffers))
        seen = []
        for share in shares:
            count = len(share.samples)
            if count not in self._seen:
                values = np.zeros(int(os.environ["DRIVER_TOKENS"]), np.float32)
                self._seen[count] = pack_tokens([TrainedTokens(values.copy(), values.copy()) for _ in range(count)])
                self._seen[count].share()  # a rank wrote it
            seen.append(refer_tokens(count, self._seen[count]))
        return Learned({"train/loss": 0.0}, 1, merge_recorded(shares, seen))

    async def push(self, version: int, plain: bool = False) -> SyncReport:
        await self.engine.update_weights((), version)
        if isinstance(self.engine, EnginePool):
            await self.engine.check_served(version)
        return SyncReport(version, 0, 0, 0.001)

    async def nothing(self, *_: Any) -> Any:
        return None

    supervise = reset_optimizer = log_probs = columns = values = top_log_probs = take_snapshot = rebuild = save = (
        load
    ) = export = nothing


class _Building(Runtime):
    """One engine and one learner."""

    run: Any

    def make_engine(self) -> Engine:
        """Return the engine."""
        return DoubleEngine()

    async def build(self, policy: Any) -> PolicyParts:
        engine = self.make_engine()
        return PolicyParts(policy, DoubleLearner(self.run, engine), engine, precisions(self.run.config, 0))


class DoubleRuntime(_Building, InlineRuntime):
    """Everything in this process."""


class DoubleRolloutRuntime(_Building, InlineRolloutRuntime):
    """Rollout workers are real, and call the engine themselves."""

    def make_engine(self) -> Engine:
        facts = {"kv_cache_dtype": "", "native_products": False, "model_facts": {}}
        return EnginePool(DoubleEngines(), {"capabilities": DoubleEngine.capabilities, **facts})


def make_runtime(run: Any) -> Runtime:
    return DoubleRuntime(run) if run.config.rollout.workers is None else DoubleRolloutRuntime(run)
