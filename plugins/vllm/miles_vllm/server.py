"""Connects to a running vLLM server, which runs this plugin's ``receiver`` in its workers.

Requests use vLLM's route for token ids, ``/inference/v1/generate``. The other calls use the routes that vLLM has with
``VLLM_SERVER_DEV_MODE=1``, among them ``/collective_rpc``, which calls the methods of ``receiver.WeightReceiver``.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.plugin import SyncError
from miles_tools.engine_server import ANSWER_SECONDS, FIRST_ANSWER_SECONDS, EngineServer
from miles_tools.http_client import check_header
from miles_vllm import receiver
from miles_workers.servers import ServerError

log = logging.getLogger(__name__)

#: Stands for the bytes of a message while its other fields are converted to JSON.
_DATA = "miles:bytes"
#: The option with the addresses of servers, and the environment variable with their key, which vLLM's server reads, too.
FLAG, KEY = "--vllm-url", "VLLM_API_KEY"
#: Route of requests, and what vLLM puts before the ids of such requests.
_GENERATE, _PREFIX = "inference/v1/generate", "generate-tokens-"
#: Route that loads an adapter; the answer to a call of a route that the server does not have; the variable for most routes used here.
_LOAD, _NO_ROUTE, _DEVELOPMENT = "v1/load_lora_adapter", '"detail"', "VLLM_SERVER_DEV_MODE=1"
#: Entries of a description that must have these values -> what to do.
_NEEDED: dict[str, tuple[Any, str]] = {
    "logprobs_mode": ("processed_logprobs", "its log-probs would not be those of the sampled distribution"),
    "quantization": (None, "weights arrive in BF16; serve an unquantised checkpoint (miles convert --to bf16)"),
    "speculative": (False, "drafts would keep the weights of the start"),
    "data_parallel_size": (1, "each copy would need the weight updates; start several servers instead"),
    "pipeline_parallel_size": (1, "a stage has only some of the parameters that updates contain"),
}
#: Entries that must be the same on all servers.
SAME = ("version", "architectures", "dtype", "kv_cache_dtype", "max_model_len")


class CorruptWeights(ServerError, SyncError):
    """A server received weights that differ from those sent, or not all of them."""


@dataclass(frozen=True)
class Needs:
    """What a run needs of a server.

    Attributes:
        checkpoint: the run's checkpoint.
        expected: arguments of ``WeightReceiver.miles_expect``; empty if the server receives adapters only.
        context: tokens of prompt and response that the server must take; 0 for any number.
        adapters: arguments of vLLM for adapters (``adapter_arguments``); empty if the server receives all weights.
    """

    checkpoint: str
    expected: Sequence[Any] = ()
    context: int = 0
    adapters: Mapping[str, Any] = field(default_factory=dict)

    def command(self) -> str:
        """Return the command that starts such a server."""
        variables = f"{_DEVELOPMENT} VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" if self.adapters else _DEVELOPMENT
        room = "".join(f" {_flag(name, value)}" for name, value in self.adapters.items())
        return (
            f"{variables} vllm serve {self.checkpoint} --enable-scale-out --logprobs-mode processed_logprobs "
            f"--worker-extension-cls {receiver.NAME}{room}"
        )


def _flag(name: str, value: Any) -> str:
    shown = "" if value is True else " ".join(value) if isinstance(value, list) else value
    return f"--{name.replace('_', '-')} {shown}".rstrip()


def _has_room(has: Any, needed: Any) -> bool:
    return set(needed) <= set(has or ()) if isinstance(needed, list) else (has or 0) >= needed


class ServerLink(EngineServer):
    """Connection to a server.

    Args:
        url, startup_timeout: see ``EngineServer``.
        needs: what the run needs.
    """

    program, flag = "vLLM", FLAG

    def __init__(self, url: str, startup_timeout: float, needs: Needs) -> None:
        super().__init__(url, startup_timeout)
        self._needs = needs

    def headers(self) -> dict[str, str]:
        key = check_header(os.environ.get(KEY, ""), f"the environment variable {KEY}")
        return {**super().headers(), **({"Authorization": f"Bearer {key}"} if key else {})}

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, Any]:
        self.open()
        try:
            found = await self.wait_for(lambda timeout: self.ask("version", None, timeout))
            if not isinstance(found, Mapping) or "version" not in found:
                raise ServerError(
                    f"{FLAG} {self.url}: the answer of version is not in vLLM's format, so another program answers there; give the address of a vLLM "
                    "server"
                )
            info = {**await self._describe(FIRST_ANSWER_SECONDS), "version": found["version"]}
            self._check(info)
            for route in (_GENERATE, _LOAD) if self._needs.adapters else (_GENERATE,):
                with suppress(_Malformed):  # an empty call is
                    await self.ask(route, {}, FIRST_ANSWER_SECONDS)
            if (await self.ask("is_paused", None, FIRST_ANSWER_SECONDS)).get("is_paused"):
                log.warning("%s %s: the server was paused, maybe by a run that ended; it continues now", FLAG, self.url)
                await self.resume()
            if self._needs.expected:
                await self._rpc("miles_expect", *self._needs.expected, timeout=FIRST_ANSWER_SECONDS)
            return info
        except BaseException:
            await self.stop()
            raise

    async def version(self, timeout: float) -> str:
        return str((await self._describe(timeout))["weights"])

    async def _describe(self, timeout: float) -> Mapping[str, Any]:
        """Return what the workers say of themselves (``WeightReceiver.miles_describe``)."""
        found: Mapping[str, Any] = (await self._rpc("miles_describe", timeout=timeout))[0]
        return found

    def _check(self, info: Mapping[str, Any]) -> None:
        """Raise ServerError if the server runs with options with which it cannot serve this run."""
        for name, (needed, why) in _NEEDED.items():
            if info[name] != needed:
                raise ServerError(
                    f"{FLAG} {self.url}: the server runs with {name} = {info[name]}, and this engine needs {needed}: {why}; "
                    f"start it with {self._needs.command()}"
                )
        context, adapters = self._needs.context, self._needs.adapters
        if info["max_model_len"] <= context:
            raise ServerError(
                f"{FLAG} {self.url}: the server runs with --max-model-len {info['max_model_len']}, and --rollout-max-context-len is "
                f"{context}; start it with --max-model-len {context + 1}"
            )
        for name, value in adapters.items():
            if not _has_room(info["adapters"].get(name), value):
                raise ServerError(
                    f"{FLAG} {self.url}: the server runs with {name} = {info['adapters'].get(name)}, which is too little for the adapters of "
                    f"this run; start it with {self._needs.command()}"
                )

    def refusal(self, path: str, status: int, text: str) -> ServerError:
        place, start = f"{FLAG} {self.url}", f"start it with {self._needs.command()}"
        if status in (401, 403) and "scale-out" not in text.lower():
            return ServerError(
                f"{place}: the server refuses the key of this run ({status}): put its key into the environment variable {KEY}"
            )
        if path == _GENERATE and (status == 403 or (status == 404 and _NO_ROUTE in text)):
            return ServerError(f"{place}: the server does not answer requests with token ids ({status}): {start}")
        if path == "version" and status < 500:
            return ServerError(
                f"{place}: {path} answered {status}, so another program answers there; give the address of a vLLM server"
            )
        if status == 404 and _NO_ROUTE in text:
            return ServerError(f"{place}: the server has no route {path}: {start}")
        if path == "collective_rpc" and "has no attribute 'miles_" in text:
            return ServerError(f"{place}: the server's workers cannot receive weights from this plugin: {start}")
        if path == _LOAD and status == 500:
            return ServerError(f"{place}: the server rejected the adapter: {text}")
        if path in (_GENERATE, _LOAD) and status in (400, 422):
            return _Malformed(f"{place}: {path} answered {status}: {text}")
        return super().refusal(path, status, text)

    # -- calls ----------------------------------------------------------------------------------------------------

    async def generate(
        self, rid: str, tokens: Sequence[int] | NDArray[Any], parameters: Mapping[str, Any], adapter: str = ""
    ) -> Any:
        """Generate a response, see ``Host.generate``."""
        body = {"request_id": rid, "token_ids": np.asarray(tokens).tolist(), "sampling_params": dict(parameters)}
        answer = await self.ask(_GENERATE, {**body, "model": adapter} if adapter else body, is_request=True)
        try:
            return _read(answer)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ServerError(
                f"{FLAG} {self.url}: the answer of {_GENERATE} is not in vLLM's format ({type(error).__name__}: {error})"
            ) from error

    async def abort(self, rid: str) -> Any:
        return await self.ask("abort_requests", {"request_ids": [_PREFIX + rid]})

    async def pause(self) -> None:
        """Stop the scheduler. Cached prefixes are dropped."""
        await self.ask("pause?mode=abort&clear_cache=true", {})

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self.ask("resume", {})

    async def receive(self, body: bytes) -> dict[str, Any]:
        """Pass an encoded call of ``WeightReceiver.miles_receive`` on to the workers.

        Raises:
            CorruptWeights: the weights differ from those sent.
            ServerError: a worker refused the message.
        """
        answers = (await self.ask("collective_rpc", body))["results"]
        for answer in answers:
            if "error" in answer:
                kind = CorruptWeights if answer["corrupt"] else ServerError
                raise kind(f"{FLAG} {self.url}: {answer['error']}")
        if answers[0]["complete"]:
            await self.ask("reset_prefix_cache", {})
        first: dict[str, Any] = answers[0]
        return first

    async def load_adapter(self, name: str, config: Mapping[str, Any], tensors: str) -> None:
        """Load an adapter, see ``WeightReceiver.miles_write_adapter``."""
        path = (await self._rpc("miles_write_adapter", name, dict(config), tensors))[0]
        try:
            await self.ask(_LOAD, {"lora_name": name, "lora_path": path})
        except ServerError:
            await self._rpc("miles_remove_adapter", name)
            raise

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        await self.ask("v1/unload_lora_adapter", {"lora_name": name})
        await self._rpc("miles_remove_adapter", name)

    async def _rpc(self, method: str, *args: Any, timeout: float = ANSWER_SECONDS) -> list[Any]:
        found: list[Any] = (await self.ask("collective_rpc", {"method": method, "args": args}, timeout))["results"]
        return found


class _Malformed(ServerError):
    """The server understood the route, and not the body."""


def encode(message: Mapping[str, Any], version: int, last: bool) -> bytes:
    """Return the body of a call of ``WeightReceiver.miles_receive``; the bytes of a message become text."""
    where, data = message["memory"], b""
    if where["kind"] == "data":
        where, data = {**where, "data": _DATA}, base64.b64encode(where["data"])
    body = json.dumps({"method": "miles_receive", "args": [{**message, "memory": where}, version, last]})
    return body.encode().replace(
        _DATA.encode(), data, 1
    )  # base64 needs no quoting, which would take longer than the rest


def _read(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the answer of a request to the result of ``Host.generate``."""
    made, scored = answer["choices"][0], answer.get("prompt_logprobs")
    log_probs = [entry["logprob"] for entry in ((made.get("logprobs") or {}).get("content") or ())]
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return {
        "tokens": np.array(made["token_ids"], np.int32),
        "log_probs": np.array(log_probs, np.float32),
        "finish": made["finish_reason"],
        "cached_tokens": details.get("cached_tokens") or 0,
        "routes": None,  # the plan refuses them with running servers
        "prompt_log_probs": None if scored is None else _scores(scored),
    }


def _scores(entries: Sequence[Mapping[str, Any] | None]) -> NDArray[Any]:
    """Return the log-probability of each token of a prompt but the first."""
    return np.array([next(iter(each.values()))["logprob"] for each in entries if each], np.float32)
