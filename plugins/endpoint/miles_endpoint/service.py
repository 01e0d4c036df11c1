"""Shared code of all interfaces: the models of the run, and the steps from a request's parameters to a reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_endpoint.api_error import refuse
from miles_endpoint.call import overridden, read_stop, read_whole
from miles_tools.http_server import ApiError

if TYPE_CHECKING:
    from miles_core.engine import Sampling
    from miles_endpoint.session import Session

#: Most answers to one request.
MAX_N = 128


@dataclass(frozen=True)
class Models:
    """The models that agents can name.

    Attributes:
        policies: model name -> policy; "" is the sample's policy.
        frozen: policies that are not trained, whose requests may set temperature, top_p and top_k.
    """

    policies: Mapping[str, str]
    frozen: frozenset[str] = frozenset()

    def policy_of(self, body: Mapping[str, Any]) -> str:
        """Return the policy that a request names.

        Raises:
            ApiError: there is no such model.
        """
        name = body.get("model", "default")
        if not isinstance(name, str) or name not in self.policies:
            raise ApiError(
                404,
                f"the model {name!r:.80} does not exist; the models of this run are {', '.join(self.policies)} (--agent-models adds "
                "names for the policy)",
                "model_not_found",
            )
        return self.policies[name]


@dataclass(frozen=True)
class Reply:
    """Functions that answer a request.

    Attributes:
        work: generates the answers.
        body: answers -> the JSON body.
        events: body -> the server-sent events of a streamed answer.
    """

    work: Callable[[], Awaitable[list[Any]]]
    body: Callable[[list[Any]], dict[str, Any]]
    events: Callable[[dict[str, Any]], Iterator[bytes]]


def read_sampling(
    body: Mapping[str, Any], session: Session, models: Models, policy: str, limits: tuple[str, ...]
) -> Sampling:
    """Return the sampling parameters of a request.

    Args:
        body: the request.
        session: its session, with the run's parameters.
        models: the models of the run.
        policy: the policy that answers.
        limits: names of the parameters with the maximum number of tokens.

    Raises:
        ApiError: a value is invalid.
    """
    usual = session.ask.sampling
    wanted = [value for name in limits if (value := read_whole(body, name, 1, 2**31)) is not None]
    changes: dict[str, Any] = {"stop": (*usual.stop, *read_stop(body))}
    if wanted:
        changes["max_new_tokens"] = min(usual.max_new_tokens, *wanted)
    if policy in models.frozen:
        changes |= _free_parameters(body)
    elif overridden(body, usual):
        session.counts["overridden"] += 1
    return dataclasses.replace(usual, **changes)


def _free_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: body[name] for name in ("temperature", "top_p", "top_k") if body.get(name) is not None}
    for name, value in chosen.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value < (-1 if name == "top_k" else 0):
            raise refuse(f"{name} is {value!r:.40}; it must be a number from 0")
    return chosen


def usage_of(prompts: int, completions: int, kind: str = "prompt completion") -> dict[str, int]:
    """Return the token counts of a reply; ``kind`` names the two counts."""
    first, second = kind.split()
    return {f"{first}_tokens": prompts, f"{second}_tokens": completions, "total_tokens": prompts + completions}
