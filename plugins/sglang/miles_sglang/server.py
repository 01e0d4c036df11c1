"""Connects to a running SGLang server over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from miles_core.plugin import redact
from miles_sglang.answers import Answer
from miles_tools.engine_server import FIRST_ANSWER_SECONDS, EngineServer
from miles_workers.servers import NotReachable, ServerError

#: The option with the addresses of servers.
FLAG = "--sglang-url"
#: Options of which a server may have more than the run needs, and all that the run's adapters need.
_LEAST = frozenset({"max_lora_rank", "max_loaded_loras", "max_loras_per_batch"})
_OF_ADAPTERS = _LEAST | {"enable_lora", "lora_target_modules"}


class ServerLink(EngineServer):
    """Connection to a server at an address.

    Args:
        url, startup_timeout: see ``EngineServer``.
        arguments: the user's ServerArgs; the server must have been started with the same values.
    """

    program, flag = "SGLang", FLAG

    def __init__(
        self, url: str, startup_timeout: float = 900.0, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        super().__init__(url, startup_timeout)
        self.arguments, self.ranks = arguments, 1

    async def start(self) -> Mapping[str, Any]:
        self.open()
        try:
            info = await self._first_answer()
            if not isinstance(info, Mapping) or "tp_size" not in info:
                raise ServerError(
                    f"--sglang-url {self.url}: the answer of server_info has no tp_size, so another program answers there; give the address of an "
                    "SGLang server"
                )
            self._check(info)
            self.ranks = int(info["tp_size"])
            return {**info, **await self._describe(FIRST_ANSWER_SECONDS)}
        except BaseException:
            await self.stop()
            raise

    async def version(self, timeout: float) -> str:
        return str((await self._describe(timeout)).get("weight_version"))

    async def _describe(self, timeout: float) -> Mapping[str, Any]:
        """Return the server's ``model_info``: ``architectures``, ``weight_version``, ... Its scheduler is not involved."""
        found = await self.ask("model_info", None, timeout)
        if not isinstance(found, Mapping):
            raise ServerError(
                f"--sglang-url {self.url}: the answer of model_info is not in SGLang's format; give the address of an SGLang server"
            )
        return found

    async def _first_answer(self) -> Any:
        """Return the server's ``server_info``, waiting until it is up."""
        try:
            return await self.wait_for(lambda timeout: self.ask("server_info", None, timeout))
        except NotReachable:
            raise
        except ServerError as error:
            raise ServerError(
                f"{error}; another program answers there, or a version of SGLang that this plugin does not support: give the address of an SGLang "
                "server"
            ) from error

    def _check(self, info: Mapping[str, Any]) -> None:
        """Raise ServerError if the server runs with other options than this run, or with a draft model."""
        draft = info.get("speculative_draft_model_path")
        if draft not in (None, info.get("model_path")):
            raise ServerError(
                f"--sglang-url {self.url}: the server drafts with {draft}, and would load every weight update into the draft model, too; "
                "start it without the draft"
            )
        other = [
            name for name, value in self.arguments.items() if name in info and not _suffices(name, info[name], value)
        ]
        if other and other[0] in _OF_ADAPTERS:
            name, value = other[0], self.arguments[other[0]]
            needed = " ".join(value) if isinstance(value, list) else "" if value is True else str(value)
            raise ServerError(
                f"--sglang-url {self.url}: the server runs with {name} = {info[name]}, which is too little for the adapters of this run; "
                f"start it with --{name.replace('_', '-')} {needed}".rstrip()
            )
        if other:
            flag = f"--sglang-{other[0].replace('_', '-')}"
            raise ServerError(
                f"--sglang-url {self.url}: the server runs with {other[0]} = {info[other[0]]}, and {flag} of this run is "
                f"{self.arguments[other[0]]}; start the server with the same value, or remove the option from this run"
            )

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        """Call the endpoint ``generate``."""
        return _parse_answer(await self.ask("generate", body, is_request=True), self.url)

    async def abort(self, rid: str) -> Any:
        return await self.ask("abort_request", {"rid": rid})

    async def call(self, endpoint: str, body: Mapping[str, Any]) -> Any:
        """Call another endpoint, see ``Link.call``."""
        answer = await self.ask(endpoint, {} if endpoint == "flush_cache" else body)
        return {"success": True} if endpoint == "flush_cache" else answer

    async def send(self, endpoint: str, message: bytes) -> Any:
        """Call an endpoint with a body that is already encoded as JSON."""
        return await self.ask(endpoint, message)


def _parse_answer(answer: Any, url: str) -> Answer:
    """Parse an answer of ``generate``. Raises ServerError if it is malformed."""
    try:
        found = Answer.from_sglang(answer)
        reason = found.meta["finish_reason"]
        if not (reason is None or isinstance(reason["type"], str)):
            raise TypeError("finish_reason")
        str(found.meta["weight_version"])
        return found
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        excerpt = redact(repr(answer))[:200]
        raise ServerError(
            f"--sglang-url {url}: the answer of generate is not in SGLang's format ({type(error).__name__}: {error}): {excerpt}; "
            "correct the address, or start a server of the supported version"
        ) from error


def _suffices(name: str, has: Any, needed: Any) -> bool:
    """Whether the value that a server reports for an option serves a run that needs another or the same one."""
    if name in _LEAST:
        return has is None or has >= needed
    if name == "lora_target_modules":
        return "all" in (has or ()) or {*needed} <= {*(has or ())}
    return bool(has == needed) or (needed == "NEXTN" and has == "EAGLE")  # SGLang's name of this alias
