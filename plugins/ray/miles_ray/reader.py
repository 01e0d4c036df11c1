"""An actor on the driver's machine that reads objects of Ray's object store for the driver (``miles_workers.object_reader``)."""

from __future__ import annotations

from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles_core.plugin import MilesError
from miles_ray.watch import RAYLET, raylet_lives
from miles_workers import ObjectReader, ReaderEnded, load_function, make_answer


class ReaderActor:
    """Calls a function with each message. target: makes the function, see ``RemoteStore.open_reader``."""

    def __init__(self, target: str) -> None:
        self._function = load_function(target)

    def answer(self, value: Any) -> tuple[Any, Exception | None]:
        """Return the function's result or its error."""
        return make_answer(self._function, value)


class RayReader(ObjectReader):
    """The driver's end."""

    def __init__(self, target: str) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = ray.remote(ReaderActor)
        self._actor = actor.options(num_cpus=0, scheduling_strategy=here).remote(target)
        self._answer: Any = None

    def send(self, value: Any) -> None:
        if not raylet_lives():  # Ray would exit this process without a message
            raise ReaderEnded(f"cannot be called: {RAYLET} died")
        self._answer = self._actor.answer.remote(value)

    def receive(self) -> Any:
        call, self._answer = self._answer, None
        try:
            answer, error = ray.get(call)
        except exceptions.RayTaskError as failed:  # the message cannot be deserialized
            raise MilesError(str(failed)) from failed
        except exceptions.RayError as lost:
            raise ReaderEnded(f"was lost ({type(lost).__name__}: a crash, a kill, or no memory)") from lost
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        if ray.is_initialized() and raylet_lives():
            ray.kill(self._actor)
