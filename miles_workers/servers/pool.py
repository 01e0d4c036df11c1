"""Several running servers as one engine. The list of servers may change during a run.

A server takes requests once it has the weights of the current version. One that joins late receives them with the next update of the weights,
like a replaced engine (``miles_workers.EnginePool``), and takes requests if it then computes the same log-probs as another server. Adapters
(transport ``adapter``) are kept apart: a server takes the requests whose adapter it has loaded. The requests of a server that leaves are sent
again to other servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from miles_core.errors import ConfigError
from miles_core.redact import redact
from miles_workers.servers.errors import NotReachable, ServerError, ServerLeft, ServersLost
from miles_workers.servers.member import Member, Server
from miles_workers.servers.metrics import PoolNews
from miles_workers.servers.same_model import SameModel
from miles_workers.servers.server_list import ServerList

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Server)
T = TypeVar("T")

#: Seconds between two looks at the list and at the servers.
LOOK_SECONDS = 2.0
#: Seconds without an answer of a server's process, which answers also while it computes, after which the server has left.
HUNG_SECONDS = 60.0
#: How long a server that was removed from the list has to abort a request.
_ABORT_SECONDS = 10.0


class ServerPool(Generic[S]):
    """The servers of a list.

    Args:
        servers: the list.
        connect: makes the connection to an address: (address, seconds to wait for the first answer).
        startup_timeout: seconds to wait for each server of the first list.
        model: what the servers must serve.
        score: returns a server's log-probs of ``SameModel.probe``.

    Attributes:
        news: what happened to the servers, for the metrics.
        version: version of the weights that the servers have; empty before the first update.
    """

    def __init__(
        self,
        servers: ServerList,
        connect: Callable[[str, float], S],
        startup_timeout: float,
        model: SameModel,
        score: Callable[[S], Awaitable[NDArray[Any]]],
    ) -> None:
        self._servers, self._connect, self._startup_timeout = servers, connect, startup_timeout
        self._model, self._score, self.news = model, score, PoolNews()
        self._origin = f"{servers.flag} {servers}"
        self._listed: tuple[str, ...] = ()
        self._members: dict[str, Member[S]] = {}
        self._asked: dict[str, Member[S]] = {}  # id of a request in flight -> its server
        self._receiving: list[Member[S]] = []  # the servers that receive the update in progress
        self.version, self._paused = "", False
        self._last_cause = ""
        self._refused: set[str] = set()  # addresses of servers that cannot serve this run
        self._silent: set[str] = set()  # addresses at which no server answers yet
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> list[Mapping[str, Any]]:
        """Connect to all servers of the list; returns their descriptions."""
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
        log.info("%d %s servers: %s", len(links), self._model.program, ", ".join(map(redact, links)))
        self._spawn(self._watch())
        return self.descriptions()

    def descriptions(self) -> list[Mapping[str, Any]]:
        """Return the descriptions of all servers. Raises ServerError if none is left."""
        self._check_any()
        return [member.info for member in self._members.values()]

    async def stop(self) -> None:
        """Disconnect from all servers. Safe to call twice."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        members, self._members = self._members, {}
        await asyncio.gather(*(member.link.stop() for member in members.values()))

    async def restart(self) -> list[Mapping[str, Any]]:
        """Return the descriptions of the servers that are left or have joined. The engine then sends them the weights."""
        while any(member.gone.is_set() for member in self._asked.values()):  # their requests end now
            await asyncio.sleep(0)
        return self.descriptions()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self, rid: str, adapter: str, ask: Callable[[S], Awaitable[T]], version_of: Callable[[T], str] | None = None
    ) -> T:
        """Send a request to the server with the fewest open ones among those that have the weights of the request.

        Args:
            rid: id of the request.
            adapter: name of its adapter; empty without one.
            ask: sends it.
            version_of: answer -> version of the weights, if the servers report it.

        Raises:
            ServerLeft: the server left meanwhile; send the request again.
        """
        found = [member for member in self._members.values() if member.serves(adapter)]
        self._check_found(found)
        member = min(found, key=lambda member: member.open)
        version, member.open, self._asked[rid] = member.version, member.open + 1, member
        try:
            answer = await member.until_gone(ask(member.link))
            has = version if version_of is None else version_of(answer)
            if not version or has == version:
                return answer
            self._leave(member, f"it has weights of version {has} instead of {version}")
        except NotReachable as error:
            self._leave(member, error.cause)
        except ServerLeft:
            pass
        finally:
            member.open -= 1
            del self._asked[rid]
        self.news.retried += 1
        raise ServerLeft(f"{redact(member.link.url)} left: {member.cause}")

    async def generate_each(self, adapter: str, ask: Callable[[S], Awaitable[T]]) -> Mapping[str, T]:
        """Send a request to every server that has its weights: address -> answer."""
        found = await self._ask_all([m for m in self._members.values() if m.serves(adapter)], ask)
        self._check_found(found)
        return {redact(member.link.url): answer for member, answer in found.items()}

    async def abort(self, rid: str) -> Any:
        """End a request; None if no server has it."""
        member = self._asked.get(rid)
        answers = await self._ask_all([] if member is None else [member], lambda link: link.abort(rid))
        return next(iter(answers.values()), None)

    # -- calls ----------------------------------------------------------------------------------------------------

    async def call(self, ask: Callable[[S], Awaitable[T]]) -> T | None:
        """Call all servers; returns the first answer, None if every one left meanwhile and others joined."""
        answers = await self._ask_all(self._members.values(), ask)
        self._check_any()
        return next(iter(answers.values()), None)

    async def pause(self, ask: Callable[[S], Awaitable[T]]) -> T | None:
        """``call`` with a call that pauses: servers that join wait for ``resume``."""
        self._paused = True
        return await self.call(ask)

    async def resume(self, ask: Callable[[S], Awaitable[T]]) -> T | None:
        """``call`` with a call that ends a pause."""
        answer = await self.call(ask)
        self._paused = False
        await self._admit()
        return answer

    async def _ask_all(
        self, members: Collection[Member[S]], ask: Callable[[S], Awaitable[T]], refuse: bool = False
    ) -> dict[Member[S], T]:
        """Call several servers; return server -> answer, without servers that left meanwhile.

        Args:
            refuse: a server that rejects the call leaves, if another one accepts it.

        Raises:
            ServerError: a server rejected the call; with ``refuse`` all did.
        """
        found, rejections = dict[Member[S], T](), dict[Member[S], ServerError]()

        async def ask_one(member: Member[S]) -> None:
            try:
                found[member] = await member.until_gone(ask(member.link))
            except NotReachable as error:
                self._leave(member, error.cause)
            except ServerLeft:
                pass
            except ServerError as error:
                rejections[member] = error

        members = list(members)
        await asyncio.gather(*map(ask_one, members))
        if rejections and not (refuse and found):
            raise next(iter(rejections.values()))
        for member, error in rejections.items():
            self._refuse(member, str(error))
        return {member: found[member] for member in members if member in found}

    # -- weights --------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Called before the first part of an update: later servers do not receive its other parts."""
        self._receiving = list(self._members.values())

    async def update(self, ask: Callable[[S], Awaitable[T]], version: str | None) -> T:
        """Send a part of an update to the servers that have received its other parts.

        Args:
            ask: sends the part.
            version: the version that it completes; None for all parts but the last.
        """
        members = [member for member in self._receiving if member in self._members.values()]
        answers = await self._ask_all(members, ask, refuse=bool(self.version))
        self._check_found(answers)
        if version is not None:
            self.version, self._receiving = version, []
            for member in answers:
                member.version = version
            if not self._paused:
                await self._admit()
        return next(iter(answers.values()))

    async def load_adapter(
        self, name: str, ask: Callable[[S], Awaitable[T]], accepted: Callable[[T], bool] = lambda answer: True
    ) -> T:
        """Load an adapter on all servers; returns the answer of one that did not accept it, if there is one."""
        answers = await self._ask_all([m for m in self._members.values() if m.serving], ask, refuse=True)
        self._check_found(answers)
        for member, answer in answers.items():
            if accepted(answer):
                member.adapters.add(name)
        return next((answer for answer in answers.values() if not accepted(answer)), next(iter(answers.values())))

    async def unload_adapter(self, name: str, ask: Callable[[S], Awaitable[Any]]) -> None:
        """Unload an adapter from the servers that have it."""
        members = [member for member in self._members.values() if name in member.adapters]
        for member in members:
            member.adapters.discard(name)
        await self._ask_all(members, ask, refuse=True)

    async def _admit(self) -> None:
        """Let servers take requests that have received the current weights."""
        for member in [m for m in self._members.values() if not m.serving and m.version == self.version]:
            await self._admit_one(member)

    async def _admit_one(self, member: Member[S]) -> None:
        while others := [other for other in self._members.values() if other.serving]:
            try:
                answers = await self._ask_all([member, others[0]], self._score)
                if member not in answers:  # it left
                    return
                if others[0] in answers:
                    self._model.compare((member, answers[member]), (others[0], answers[others[0]]))
                    break
            except ServerError as error:
                self._refuse(member, str(error))
                return
        member.serving = True
        self.news.joined += 1
        self.news.serving += 1
        version = f" with version {member.version} of the weights" if member.version else ""
        log.warning(
            "%s: %s joined%s; %d servers serve now", self._origin, redact(member.link.url), version, self.news.serving
        )

    # -- changes --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
            except Exception:
                log.exception(
                    "%s: the servers could not be looked at; the run continues with the same ones", self._origin
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
        except ServerError as error:
            await link.stop()
            self._refused.add(url)
            log.warning("%s; the run continues without this server", error)
            return
        self._silent.discard(url)
        self._members[url] = member
        if self._model.receives:
            log.info("%s: %s answers; it joins with the next weights", self._origin, redact(url))
        else:
            await self._admit_one(member)

    def _refuse(self, member: Member[S], cause: str) -> None:
        """Remove a server that cannot serve this run. It does not join again before the list changes."""
        self._refused.add(member.link.url)
        self._leave(member, cause)

    async def _ping(self, member: Member[S]) -> None:
        """Remove a server that does not answer, or that was restarted and has other weights."""
        version, member.pinged = member.version, True
        try:
            found = await member.link.version(HUNG_SECONDS)
        except NotReachable as error:
            self._leave(member, error.cause)
        except ServerError:
            pass  # the connection was closed meanwhile
        else:
            if version and not self._receiving and version == member.version != found:
                self._leave(member, f"it has weights of version {found} instead of {version}")
        finally:
            member.pinged = False

    def _leave(self, member: Member[S], cause: str) -> None:
        if self._members.get(member.link.url) is not member:
            return
        del self._members[member.link.url]
        member.cause = self._last_cause = cause
        member.gone.set()
        if member.serving:
            self.news.left += 1
            self.news.serving -= 1
        log.warning(
            "%s: %s left (%s); its %d open requests are repeated on other servers; %d servers remain",
            self._origin, redact(member.link.url), cause, member.open, self.news.serving,
        )  # fmt: skip
        self._spawn(member.link.stop())

    def _remove(self, member: Member[S]) -> None:
        """Remove a server that is no longer in the list, and stop its requests."""
        rids = [rid for rid, asked in self._asked.items() if asked is member]
        self._spawn(self._abort(self._connect(member.link.url, 0.0), rids))
        self._leave(member, f"it was removed from {self._servers}")

    async def _abort(self, link: S, rids: Collection[str]) -> None:
        with suppress(ServerError, TimeoutError):  # the server may be on its way down
            async with asyncio.timeout(_ABORT_SECONDS):
                await link.start()
                await asyncio.gather(*(link.abort(rid) for rid in rids))
        await link.stop()

    def _check_found(self, found: Collection[Any]) -> None:
        """Raise ServersLost if no server was found, but others could receive the weights; ServerError if no server is left."""
        if not found:
            self._check_any()
            raise ServersLost(f"{self._last_cause or 'servers left'}, and no other server has the weights yet")

    def _check_any(self) -> None:
        """Raise ServerError if no server is left."""
        if not self._members:
            raise ServerError(
                f"{self._origin}: no server is left: {self._last_cause}; start a server, and continue the run with --load"
            )
