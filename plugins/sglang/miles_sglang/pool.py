"""Several running servers as one SGLang. The list of servers may change during a run.

A server takes requests once it has the weights of the current version. One that joins late receives them with the next update of the weights,
like a replaced engine (``miles_workers.EnginePool``), and takes requests if it then computes the same log-probs as another server. Adapters
(transport ``adapter``) are kept apart: a server takes the requests whose adapter it has loaded. The requests of a server that leaves are sent
again to other servers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from miles_core.plugin import ConfigError, redact
from miles_sglang import tensor_messages
from miles_sglang.answers import Answer
from miles_sglang.choices import Choices
from miles_sglang.link import Link, PoolNews, ServerLeft, SglangError, SglangLost
from miles_sglang.member import Member, Model
from miles_sglang.server import NotReachable, ServerLink
from miles_sglang.server_list import ServerList

log = logging.getLogger(__name__)

#: Seconds between two looks at the list and at the servers.
LOOK_SECONDS = 2.0
#: Seconds without an answer of a server's process, which answers also while it computes, after which the server has left.
HUNG_SECONDS = 60.0
#: How long a server that was removed from the list has to abort a request.
_ABORT_SECONDS = 10.0
_UPDATES = ("update_weights_from_tensor", "update_weights_from_disk")
_LOADS = ("load_lora_adapter", "load_lora_adapter_from_tensors")


class PoolLink(Link):
    """A connection to the servers of a list.

    Args:
        servers: the list.
        connect: makes the connection to an address: (address, seconds to wait for the first answer).
        startup_timeout: seconds to wait for each server of the first list.
        model: what the servers must serve.
    """

    news: PoolNews

    def __init__(
        self,
        servers: ServerList,
        connect: Callable[[str, float], ServerLink],
        startup_timeout: float,
        model: Model,
    ) -> None:
        self._servers, self._connect, self._startup_timeout = servers, connect, startup_timeout
        self._model, self.news = model, PoolNews()
        self._listed: tuple[str, ...] = ()
        self._members: dict[str, Member] = {}
        self._asked: dict[str, Member] = {}  # id of a request in flight -> its server
        self._receiving: list[Member] = []  # the servers that receive the update in progress
        self._version, self._paused = "", False
        self._last_cause = ""
        self._refused: set[str] = set()  # addresses of servers that cannot serve this run
        self._silent: set[str] = set()  # addresses at which no server answers yet
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, Any]:
        self._listed = self._servers.read()
        links = {url: self._connect(url, self._startup_timeout) for url in self._listed}
        starts = [asyncio.ensure_future(link.start()) for link in links.values()]
        try:
            for (url, link), start in zip(links.items(), starts, strict=True):
                self._members[url] = Member(link, await start, serving=True)
                self._model.check(self._members[url], next(iter(self._members.values())))
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(link.stop() for link in links.values()))
            self._members.clear()
            raise
        self.news.serving = len(self._members)
        log.info("%d SGLang servers: %s", len(links), ", ".join(map(redact, links)))
        self._spawn(self._watch())
        return self._describe()

    def _describe(self) -> Mapping[str, Any]:
        """Return the ``server_info`` of the server with most ranks, which limits the size of messages."""
        return max((member.info for member in self._members.values()), key=lambda info: int(info["tp_size"]))

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        members, self._members = self._members, {}
        await asyncio.gather(*(member.link.stop() for member in members.values()))

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the description of the servers that are left or have joined. The engine then sends them the weights."""
        while any(member.gone.is_set() for member in self._asked.values()):  # their requests end now
            await asyncio.sleep(0)
        self._check_any()
        return self._describe()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- requests -------------------------------------------------------------------------------------------------

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        return await self._generate_on(self._choose(body), body)

    def _choose(self, body: Mapping[str, Any]) -> Member:
        """Return the server with the fewest open requests among those that have the weights of a request."""
        found = [member for member in self._members.values() if member.serves(body)]
        self._check_found(found)
        return min(found, key=lambda member: member.open)

    async def _generate_on(self, member: Member, body: Mapping[str, Any]) -> Answer:
        version, member.open, self._asked[body["rid"]] = member.version, member.open + 1, member
        try:
            answer = await member.until_gone(member.link.generate(body))
            if not version or answer.meta["weight_version"] == version:
                return answer
            self._leave(member, f"it has weights of version {answer.meta['weight_version']} instead of {version}")
        except NotReachable as error:
            self._leave(member, error.cause)
        except ServerLeft:
            pass
        finally:
            member.open -= 1
            del self._asked[body["rid"]]
        self.news.retried += 1
        raise ServerLeft(f"{redact(member.link.url)} left: {member.cause}")

    async def generate_each(self, body: Mapping[str, Any]) -> Mapping[str, Answer]:
        members = [member for member in self._members.values() if member.serves(body)]
        found = await self._ask_all(members, "generate", body)
        self._check_found(found)
        return {redact(member.link.url): answer for member, answer in found.items()}

    # -- calls ----------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        self._receiving = list(self._members.values())

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        if endpoint == "abort_request":
            member = self._asked.get(body["rid"])
            answers = await self._ask_all([] if member is None else [member], endpoint, body)
            return next(iter(answers.values()), {"success": True})
        if endpoint in _UPDATES:
            return await self._update(endpoint, body, payload)
        if endpoint in _LOADS:
            return await self._load_adapter(endpoint, body, payload)
        if endpoint == "unload_lora_adapter":
            return await self._unload_adapter(body)
        if endpoint == "pause_generation":
            self._paused = True
        answers = await self._ask_all(self._members.values(), endpoint, body)
        self._check_any()
        if endpoint == "continue_generation":
            self._paused = False
            await self._admit()
        return next(iter(answers.values()), {"success": True})

    async def _ask_all(
        self,
        members: Collection[Member],
        endpoint: str,
        body: Mapping[str, Any],
        refuse: bool = False,
        payload: Any = b"",
    ) -> dict[Member, Any]:
        """Call an endpoint of several servers; return server -> answer, without servers that left meanwhile.

        Args:
            refuse: a server that rejects the call leaves, if another one accepts it.

        Raises:
            SglangError: a server rejected the call; with ``refuse`` all did.
        """
        encoded = endpoint in tensor_messages.ENDPOINTS
        messages = {
            ranks: await asyncio.to_thread(tensor_messages.encode, endpoint, body, payload, ranks)
            for ranks in ({member.link.ranks for member in members} if encoded else ())
        }
        found, rejections = dict[Member, Any](), dict[Member, SglangError]()

        async def ask(member: Member) -> None:
            link = member.link
            try:
                if encoded:
                    found[member] = await member.until_gone(link.send(endpoint, messages[link.ranks]))
                elif endpoint == "generate":
                    found[member] = await member.until_gone(link.generate(body))
                else:
                    found[member] = await member.until_gone(link.call(endpoint, body))
            except NotReachable as error:
                self._leave(member, error.cause)
            except ServerLeft:
                pass
            except SglangError as error:
                rejections[member] = error

        await asyncio.gather(*map(ask, list(members)))
        if rejections and not (refuse and found):
            raise next(iter(rejections.values()))
        for member, error in rejections.items():
            self._refuse(member, str(error))
        return {member: found[member] for member in members if member in found}

    async def _update(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview) -> Any:
        """Send a part of an update to the servers that have received its other parts."""
        members = [member for member in self._receiving if member in self._members.values()]
        answers = await self._ask_all(members, endpoint, body, refuse=bool(self._version), payload=payload)
        self._check_found(answers)
        if body["weight_version"] is not None:
            self._version, self._receiving = body["weight_version"], []
            for member in answers:
                member.version = self._version
            if not self._paused:
                await self._admit()
        return next(iter(answers.values()))

    async def _load_adapter(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview) -> Any:
        members = [member for member in self._members.values() if member.serving]
        answers = await self._ask_all(members, endpoint, body, refuse=True, payload=payload)
        self._check_found(answers)
        for member, answer in answers.items():
            if answer["success"]:
                member.adapters.add(body["lora_name"])
        return next((answer for answer in answers.values() if not answer["success"]), next(iter(answers.values())))

    async def _unload_adapter(self, body: Mapping[str, Any]) -> Any:
        members = [member for member in self._members.values() if body["lora_name"] in member.adapters]
        for member in members:
            member.adapters.discard(body["lora_name"])
        await self._ask_all(members, "unload_lora_adapter", body, refuse=True)
        return {"success": True}

    async def _admit(self) -> None:
        """Let servers take requests that have received the current weights."""
        for member in [m for m in self._members.values() if not m.serving and m.version == self._version]:
            await self._admit_one(member)

    async def _admit_one(self, member: Member) -> None:
        body = {"rid": secrets.token_hex(8), **self._model.probe()}
        while others := [other for other in self._members.values() if other.serving]:
            try:
                answers = await self._ask_all([member, others[0]], "generate", body)
                if member not in answers:  # it left
                    return
                if others[0] in answers:
                    self._model.compare((member, answers[member]), (others[0], answers[others[0]]))
                    break
            except SglangError as error:
                self._refuse(member, str(error))
                return
        member.serving = True
        self.news.joined += 1
        self.news.serving += 1
        version = f" with version {member.version} of the weights" if member.version else ""
        shown = redact(member.link.url)
        log.warning(
            "--sglang-url %s: %s joined%s; %d servers serve now", self._servers, shown, version, self.news.serving
        )

    # -- changes --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
            except Exception:
                log.exception(
                    "--sglang-url %s: the servers could not be looked at; the run continues with the same ones",
                    self._servers,
                )

    async def _look(self) -> None:
        """Read the list again if it changed, connect to new servers, and look for servers that hang or were restarted."""
        if self._servers.has_changed():
            try:
                self._listed, self._refused = self._servers.read(), set()
            except ConfigError as error:
                log.warning("%s; the run continues with the servers of the previous list", error)
        new = [url for url in self._listed if url not in self._members and url not in self._refused]
        # before others leave: with a list of other servers, there must be one that can receive the weights
        await asyncio.gather(*map(self._join, new))
        for url, member in list(self._members.items()):
            if url not in self._listed:
                self._remove(member)
            elif not member.pinged:
                self._spawn(self._ping(member))

    async def _join(self, url: str) -> None:
        link = self._connect(url, 0.0)
        try:
            member = Member(link, await link.start())
            self._model.check(member, next(iter(self._members.values()), member))
        except NotReachable as error:
            if url not in self._silent:
                self._silent.add(url)
                log.info("%s; it is asked every %g s", error, LOOK_SECONDS)
            return
        except SglangError as error:
            await link.stop()
            self._refused.add(url)
            log.warning("%s; the run continues without this server", error)
            return
        self._silent.discard(url)
        self._members[url] = member
        if self._model.receives:
            log.info("--sglang-url %s: %s answers; it joins with the next weights", self._servers, redact(url))
        else:
            await self._admit_one(member)

    def _refuse(self, member: Member, cause: str) -> None:
        """Make a server leave that cannot serve this run. It does not join again before the list changes."""
        self._refused.add(member.link.url)
        self._leave(member, cause)

    async def _ping(self, member: Member) -> None:
        """Make a server leave that does not answer, or that was restarted and has other weights."""
        version, member.pinged = member.version, True
        try:
            found = await member.link.describe(HUNG_SECONDS)
        except NotReachable as error:
            self._leave(member, error.cause)
        except SglangError:
            pass  # the connection was closed meanwhile
        else:
            if version and not self._receiving and version == member.version != str(found.get("weight_version")):
                self._leave(member, f"it has weights of version {found.get('weight_version')} instead of {version}")
        finally:
            member.pinged = False

    def _leave(self, member: Member, cause: str) -> None:
        if self._members.get(member.link.url) is not member:
            return
        del self._members[member.link.url]
        member.cause = self._last_cause = cause
        member.gone.set()
        if member.serving:
            self.news.left += 1
            self.news.serving -= 1
        log.warning(
            "--sglang-url %s: %s left (%s); its %d open requests are repeated on other servers; %d servers remain",
            self._servers, redact(member.link.url), cause, member.open, self.news.serving,
        )  # fmt: skip
        self._spawn(member.link.stop())

    def _remove(self, member: Member) -> None:
        """Make a server leave that was removed from the list, and stop its requests."""
        rids = [rid for rid, asked in self._asked.items() if asked is member]
        self._spawn(self._abort(ServerLink(member.link.url, 0.0), rids))
        self._leave(member, f"it was removed from {self._servers}")

    async def _abort(self, link: ServerLink, rids: Collection[str]) -> None:
        with suppress(SglangError, TimeoutError):  # the server may be on its way down
            async with asyncio.timeout(_ABORT_SECONDS):
                await link.start()
                await asyncio.gather(*(link.call("abort_request", {"rid": rid}) for rid in rids))
        await link.stop()

    def _check_found(self, found: Collection[Any]) -> None:
        """Raise SglangLost if no server was found, but others could receive the weights; SglangError if no server is left."""
        if not found:
            self._check_any()
            raise SglangLost(f"{self._last_cause or 'servers left'}, and no other server has the weights yet")

    def _check_any(self) -> None:
        """Raise SglangError if no server is left."""
        if not self._members:
            raise SglangError(
                f"--sglang-url {self._servers}: no server is left: {self._last_cause}; start a server, and continue the run with --load"
            )


def connect_pool(choices: Choices, model: Model) -> PoolLink:
    """Return the link to the servers of ``--sglang-url``."""
    connect = partial(ServerLink, arguments=choices.arguments)
    return PoolLink(ServerList(choices.url), connect, choices.startup_timeout, model)
