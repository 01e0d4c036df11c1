"""Checks the parameters of a request and converts them to one form for all interfaces. Parameters that the engines do not support are
refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.engine import Sampling
from miles_endpoint.api_error import refuse
from miles_endpoint.messages import ChatMessage, digest_of

log = logging.getLogger(__name__)

#: Parameters that the engines do not support -> the value without effect. Other values are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "seed": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logits_processors": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "background": (False,),
    "conversation": (),
    "guided_json": (),
    "guided_regex": (),
}
#: Parameters of the run, which a request cannot change: log-probabilities are compared with the trainer's under the run's values.
_FIXED = ("temperature", "top_p", "top_k")
#: Parameters that are read, or that do not concern the answer.
# fmt: off
_READ = frozenset((
    "model", "messages", "tools", "tool_choice", "n", "stop", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "stream", "stream_options", "logprobs", "user", "metadata", "store",
    "parallel_tool_calls", "service_tier", "reasoning_effort", "reasoning", "verbosity", "prompt", "input",
    "instructions", "previous_response_id", "include", "truncation", "return_token_ids", "safety_identifier",
    "prompt_cache_key", "add_generation_prompt",
))
# fmt: on
_reported: set[str] = set()


@dataclass(frozen=True)
class Call:
    """One request.

    Attributes:
        messages: the whole conversation.
        tools: the offered tools, in the form of chat completions.
        sampling: sampling parameters of the engine's requests.
        policy: name of the policy that answers; "" for the sample's.
        n: number of answers.
        read_calls: whether tool calls are read from the answers.
    """

    messages: Sequence[ChatMessage]
    tools: tuple[dict[str, Any], ...]
    sampling: Sampling
    policy: str = ""
    n: int = 1
    read_calls: bool = True
    tools_digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools_digest", digest_of(self.policy, self.tools))


def check_parameters(body: Mapping[str, Any]) -> None:
    """Refuse parameters that the engines do not support; log unknown ones once.

    Raises:
        ApiError: names the parameter.
    """
    for name, value in body.items():
        if name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise refuse(
                    f"{name}={value!r:.60} is not supported by this run's engines; leave it out",
                    "unsupported_parameter",
                )
        elif name not in _READ and name not in _FIXED and name not in _reported and len(_reported) < 100:
            _reported.add(name)
            log.warning("the endpoint ignores the parameter %r of requests", name)


def overridden(body: Mapping[str, Any], sampling: Sampling) -> bool:
    """Return whether the request asks for other sampling parameters than the run's, which are used."""
    return any(body.get(name) not in (None, getattr(sampling, name)) for name in _FIXED)


def read_whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Return a whole number of the request; None if it is absent.

    Raises:
        ApiError: the value is not a whole number between ``low`` and ``high``.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise refuse(f"{name} is {value!r:.40}; it must be a whole number from {low} to {high}")
    return value


def read_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stop strings of the request.

    Raises: ApiError: they are not texts.
    """
    stop = body.get("stop")
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(text, str) and text for text in stops):
        raise refuse(f"stop is {stop!r:.60}; it must be a text or a list of texts")
    return tuple(stops)


def read_tools(raw: Any, flat: bool = False) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request in the form of chat completions.

    Args:
        raw: the request's ``tools``.
        flat: whether name and parameters are keys of the tool itself, as in the responses interface.

    Raises:
        ApiError: a tool is malformed, or is not a function.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise refuse(f"tools must be a list, got {raw!r:.60}")
    tools = []
    for i, tool in enumerate(raw):
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise refuse(f"tools[{i}] is of the type {kind!r:.40}; this endpoint has function tools only")
        function = tool if flat else tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise refuse(f"tools[{i}] must have a function with a name, got {tool!r:.80}")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise refuse(f"tools[{i}].parameters must be a JSON schema (an object), got {parameters!r:.60}")
        kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        tools.append({"type": "function", "function": kept})
    return tuple(tools)


def read_tool_choice(body: Mapping[str, Any]) -> bool:
    """Return whether tool calls are read from the answer.

    Raises:
        ApiError: the choice forces a call, which the engines cannot.
    """
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise refuse(
            f"tool_choice={choice!r:.60} forces a call, which this run's engines cannot; use auto",
            "unsupported_parameter",
        )
    return choice != "none"
