"""One sample's session: answers the requests of its agent, and keeps every turn's tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_core.chat import drop_earlier_rows, take_media, tokenize
from miles_core.data import CannotExtend, describe_error
from miles_core.plugin import DataError
from miles_endpoint.answer import Answer, AnswerReader
from miles_endpoint.api_error import refuse
from miles_endpoint.call import Call
from miles_endpoint.conversation import Conversations
from miles_tools.http_server import ApiError

if TYPE_CHECKING:
    from miles_core.plugin import GenerationClient, Turn

log = logging.getLogger(__name__)

#: Number of refused requests of a sample that are logged.
LOGGED = 3
#: Number of finished requests whose answers are kept for a client that repeats them.
REPLAYS = 64


@dataclass(frozen=True)
class Limits:
    """Limits of a session.

    Attributes:
        context: maximum number of tokens of prompt and answer together; None if unknown.
        turns: maximum number of answers; None for no limit.
        calls: maximum number of requests in flight.
    """

    context: int | None = None
    turns: int | None = None
    calls: int = 256


@dataclass(frozen=True)
class Generated:
    """An answer of an engine: its turn, and the parsed answer for the agent."""

    turn: Turn
    answer: Answer

    @property
    def finish(self) -> str:
        """``finish_reason`` of the OpenAI interface."""
        if self.turn.response.finish == "length":
            return "length"
        return "tool_calls" if self.answer.calls else "stop"


class Session:
    """The state of one sample's agent.

    Args:
        ask: the sample's interface to the engines.
        reader: reads answers.
        limits: limits of the session.

    Attributes:
        counts: events of the session, name -> number.
        answers: id of a turn -> the answer that was read from it.
        stored: id of a response -> its conversation, for the responses interface.
        texts: text of a prompt and its whole answer -> turn, for the completions interface.
        failure: set to the error of an engine, which ends the sample.
    """

    def __init__(self, ask: GenerationClient, reader: AnswerReader, limits: Limits) -> None:
        self.ask, self.reader, self.limits = ask, reader, limits
        self.conversations = Conversations()
        self.counts: Counter[str] = Counter()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers: dict[int, Answer] = {}
        self.stored: dict[str, tuple[Any, ...]] = {}
        self.texts: dict[str, Turn] = {}
        self.closed = False
        self._exchanges: OrderedDict[bytes, Exchange] = OrderedDict()
        self._undelivered: set[Exchange] = set()
        self._open: set[asyncio.Task[Any]] = set()
        self._started = self._since = time.monotonic()
        self._waited = 0.0
        self._turns = self._called = self._ids = 0

    @property
    def reads_images(self) -> bool:
        """Whether the run passes images to the model."""
        return self.ask.renderer.expand is not None

    # ---- requests

    async def exchange(self, digest: bytes, again: bool, work: Callable[[], Awaitable[Any]]) -> Exchange:
        """Start the work of a request, or join the work of the request that it repeats.

        Args:
            digest: identifies the request.
            again: whether the client marks the request as a repetition.
            work: generates the answer.

        Raises:
            ApiError: the session is over, or has too many requests in flight.
        """
        if self.closed:
            raise ApiError(410, "the sample of this API key has ended", "session_ended")
        known = self._exchanges.get(digest)
        if again and known is not None and not known.failed:
            self.counts["replayed"] += 1
            return known
        if len(self._open) >= self.limits.calls:
            raise ApiError(
                429,
                f"it has {len(self._open)} requests in flight, which is the maximum",
                "too_many_requests",
                retry=True,
            )
        made = Exchange(asyncio.ensure_future(work()))
        self._undelivered.add(made)
        self._exchanges[digest] = made
        self._exchanges.move_to_end(digest)
        if len(self._exchanges) > REPLAYS:
            self._exchanges.popitem(last=False)
        self._begin(made.task)
        return made

    def refuse(self, error: ApiError) -> None:
        """Count a refused request, name the sample in its message, and log the first ones of each sample."""
        self.counts["refused"] += 1
        error.message = f"sample {self.ask.sample}: {error.message}"
        if self.counts["refused"] <= LOGGED:
            log.warning("a request of the agent is refused: %s", error.message)

    def next_id(self) -> str:
        """Return an id for a reply, unique in the run."""
        self._ids += 1
        return f"{self.ask.sample}-{self._ids}"

    def deliver(self, exchange: Exchange) -> None:
        """Record that a client receives the answer of an exchange."""
        self._undelivered.discard(exchange)

    def _begin(self, task: asyncio.Task[Any]) -> None:
        if not self._open:
            self._since = time.monotonic()
        self._open.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._open.discard(task)
        if not self._open:
            self._waited += time.monotonic() - self._since
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ApiError) and not self.failure.done():
            self.failure.set_exception(error)

    # ---- answers

    async def answer(self, call: Call) -> list[Generated]:
        """Generate the answers of a chat request.

        Raises:
            ApiError: the conversation cannot be rendered, or no room is left for an answer.
        """
        after, tokens, media = await self._place(call)
        turns = await self.generate(after, tokens, call, media)
        return [self._record(call, turn) for turn in turns]

    async def generate(
        self, after: Turn | None, tokens: list[int], call: Call, media: Sequence[Any] | None = None
    ) -> list[Turn]:
        """Request ``call.n`` answers to ``tokens`` from an engine; ``after`` says which turn ``tokens`` follow, and ``media`` belong to
        ``tokens``.

        Raises:
            ApiError: no room is left for an answer, or the sample has no turns left.
        """
        length = len(tokens) + (after.end if after is not None else 0)
        sampling = self._fit(call, length)
        if self.limits.turns is not None and self._turns + call.n > self.limits.turns:
            self.counts["refused_turns"] += 1
            raise refuse(
                f"it has had {self._turns} answers, and --agent-max-turns is {self.limits.turns}",
                "turn_limit",
            )
        self._turns += call.n
        options = {"after": after, "sampling": sampling, "policy": call.policy, "media": media}
        asked = [self.ask(tokens, **options) for _ in range(call.n)]
        turns = await asyncio.gather(*asked)
        for turn in turns:
            drop_earlier_rows(turn)
        return list(turns)

    def _fit(self, call: Call, length: int) -> Any:
        """Return the sampling parameters with a length limit that fits the context."""
        context = self.limits.context
        if context is None:
            return call.sampling
        if length >= context:
            raise refuse(
                f"the conversation of {length} tokens leaves no room for an answer: the maximum context length is {context} tokens",
                "context_length_exceeded",
            )
        return dataclasses.replace(call.sampling, max_new_tokens=min(call.sampling.max_new_tokens, context - length))

    async def _place(self, call: Call) -> tuple[Turn | None, list[int], tuple[Any, ...]]:
        """Return the turn that a request continues, and the tokens that follow it with their media; None and all tokens for a new branch."""
        messages, tools = call.messages, list(call.tools)
        match = self.conversations.find(call.tools_digest, messages)
        reason = match.reason
        if match.turn is not None:
            new = [message.data for message in messages[len(messages) - match.new :]]
            start = match.turn.tokens
            try:
                tokens = await tokenize(lambda: self.ask.renderer.extend(start, new, tools), new)
                return match.turn, tokens[len(start) :], take_media(new)[1]
            except CannotExtend as error:
                reason = error.reason.replace(" ", "_")
            except Exception:  # templates and tokenizers raise errors of any type
                reason = "refused"
        tokens = await self._render(call, tools)
        parent = self.ask.transcript.find(tokens)
        if parent is not None and parent is match.turn:  # rendered again, its tokens are the same
            return parent, tokens[parent.end :], take_media([m.data for m in messages])[1][len(parent.media) :]
        self.counts[f"branch_{reason}" if reason else "conversations"] += 1
        return None, tokens, take_media([message.data for message in messages])[1]

    async def _render(self, call: Call, tools: list[dict[str, Any]]) -> list[int]:
        """Render the whole conversation. The call arguments of earlier answers are passed as the template takes them."""
        try:
            messages = self.reader.for_template(call.messages)
            return await tokenize(lambda: self.ask.renderer.render(messages, tools), [messages, tools])
        except DataError as error:
            raise refuse(f"the model's chat template refuses this conversation: {error}", "template") from error
        except Exception as error:  # templates and tokenizers raise errors of any type
            why = describe_error(error).splitlines()[0]
            raise refuse(f"this conversation cannot be rendered and tokenized: {why:.300}", "template") from error

    def _record(self, call: Call, turn: Turn) -> Generated:
        tools = call.tools if call.read_calls else ()
        answer = self.reader.read(turn, tools, call.sampling.stop, self._called)
        self._called += len(answer.calls)
        self.answers[id(turn)] = answer
        self.conversations.add(call.tools_digest, call.messages, answer.digests, turn, answer.reasoning)
        self.counts["tool_calls"] += len(answer.calls)
        self.counts["tool_errors"] += answer.errors
        return Generated(turn, answer)

    # ---- the end

    @property
    def engine_seconds(self) -> float:
        """Seconds in which at least one request waited for an engine."""
        return self._waited + (time.monotonic() - self._since if self._open else 0.0)

    @property
    def agent_seconds(self) -> float:
        """Seconds since the start in which no request waited for an engine."""
        return time.monotonic() - self._started - self.engine_seconds

    async def close(self) -> None:
        """End the session: cancel what is in flight, and discard answers that no client received."""
        self.closed = True
        for _ in range(2):  # lets pending requests reach the engine, where they can be aborted
            await asyncio.sleep(0)
        open_ = list(self._open)
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)
        self.counts["cancelled"] += len(open_)
        for exchange in self._undelivered:
            if not exchange.failed:
                self.counts["undelivered"] += 1
                for turn in exchange.turns():
                    turn.discarded = not turn.children
        if not self.failure.done():
            self.failure.cancel()


class Exchange:
    """The work of one request, which a repetition of the request joins.

    Attributes:
        task: generates the answers: a list of ``Generated`` or of turns.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task

    @property
    def failed(self) -> bool:
        """Whether the work ended without an answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def turns(self) -> list[Turn]:
        """Return the turns of the answers."""
        return [each.turn if isinstance(each, Generated) else each for each in self.task.result()]
