"""``--generate tools``: executes the calls in the model's answers and appends their results, until an answer has no call."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from miles_core.chat import Answer, Call, Dialect, attach_media, drop_earlier_rows, find_dialect, take_media, tokenize
from miles_core.data import CannotExtend, Sample, Status, describe_error, read_parts
from miles_core.plugin import Config, DataError, GenerationClient, MilesError, RolloutFunction, Run, Turn
from miles_tool_calls.budget import Budget
from miles_tool_calls.config import ToolsConfig
from miles_tool_calls.conversation import first_messages, result_messages
from miles_tool_calls.outcome import Outcome, ToolFault
from miles_tool_calls.toolbox import Session, Toolbox

log = logging.getLogger(__name__)

_ALTERNATIVE = "give --tool-prompt text, which writes schemas and results as text, or add a chat_template.jinja with tools to the checkpoint"


def make_generate(run: Run) -> ToolLoop:
    """Provider of ``--generate tools``."""
    options: ToolsConfig = run.config.tools
    renderer = run.render.renderer
    assert renderer is not None  # a rule of the manifest demands the chat template
    dialect = find_dialect(renderer, options.format, options.prompt, _ALTERNATIVE)
    role = "tool" if options.prompt == "template" else "user"
    if renderer.examine(role) != "appends":
        log.warning(
            "the chat template changes earlier text when a message of the role %s follows: after such an answer the whole conversation is "
            "rendered again, as a new branch (rollout/branches)",
            role,
        )
    return ToolLoop(run, options, Toolbox(options), dialect)


class ToolLoop(RolloutFunction):
    """Rollout function with tools.

    Args:
        run: for the context of the model, and to report how long calls take.
        options: the plugin's options.
        box: the tools.
        dialect: how the model writes calls.
    """

    def __init__(self, run: Run, options: ToolsConfig, box: Toolbox, dialect: Dialect) -> None:
        self.options, self.box, self.dialect = options, box, dialect
        self.context = context_of(run.config, run.plan.fact("model.context"))
        self.clock = run.clock

    async def start(self) -> None:
        await self.box.start()
        names = ", ".join(self.box.parameters)
        log.info("tools: %s; the model writes calls in the format %s", names, self.dialect.name)

    async def stop(self) -> None:
        await self.box.stop()

    async def __call__(self, sample: Sample, ask: GenerationClient) -> list[Sample]:
        rollout = Rollout(self, sample, ask)
        fault = 0.0
        try:
            async with self.box.open(sample) as session:
                await rollout.run(session)
        except ToolFault as error:
            log.warning("sample %s fails: %s", sample.index, error)
            sample.status, fault = Status.FAILED, 1.0
        ask.metrics |= rollout.budget.metrics() | {"tools/failed_samples": fault}
        sample.metadata["tool_calls"] = rollout.record
        made = ask.transcript.samples(sample)
        return made or [sample]


def context_of(config: Config, model: Any) -> int | None:
    """Return the largest number of tokens of a conversation; None if it is unknown."""
    return config.rollout.max_context_len or (int(model) if model is not None else None)


class Rollout:
    """The conversation of one sample.

    Attributes:
        budget: limits and counts.
        record: the calls, for rewards and the report: turn, name, arguments, whether it failed, seconds.
    """

    def __init__(self, loop: ToolLoop, sample: Sample, ask: GenerationClient) -> None:
        self.loop, self.sample, self.ask = loop, sample, ask
        self.budget = Budget(loop.options)
        self.record: list[dict[str, Any]] = []
        self._schemas = loop.box.schemas
        self._parameters = loop.box.parameters
        self._ids = 0
        self._short = False  # the context leaves less room for the answer than its own limit

    async def run(self, session: Session) -> None:
        """Alternate answers and calls until an answer has no call or a limit of the sample is reached."""
        mode = self.loop.options.prompt
        prompt = self.sample.prompt
        if self.sample.media and not isinstance(prompt, str):
            prompt = attach_media(prompt, self.sample.media)
        messages = first_messages(prompt, self._schemas, mode, self.ask.renderer)
        tools = self._schemas if mode == "template" else None
        tokens = await self._tokenize(lambda: self.ask.renderer.render(messages, tools), messages)
        media: tuple[Any, ...] = take_media(messages)[1]
        turn: Turn | None = None
        for number in range(self.loop.options.turns):
            turn = await self._answer(tokens, turn, media)
            if turn is None or turn.response.finish != "stop":
                if turn is not None and self._short:
                    self.budget.reached.add("context")
                return
            answer = self._read(turn)
            self.sample.metadata["answer"] = answer.content
            if not answer.calls:
                return
            if number + 1 == self.loop.options.turns:
                self._stop("turns")
                return
            ids, names = self._name(answer)
            contents = await self._carry_out(session, answer, names, number)
            messages.append(self._message(answer, ids, names, mode))
            render = partial(result_messages, names, ids, mode=mode)
            new, tokens, after = await self._append_results(turn, render, contents, messages, tools)
            messages += new
            media = take_media(messages if after is None else new)[1]
            turn = after

    async def _append_results(
        self,
        turn: Turn,
        render: Callable[[list[str | list[Any]]], list[dict[str, Any]]],
        contents: list[str | list[Any]],
        messages: list[dict[str, Any]],
        tools: Sequence[Any] | None,
    ) -> tuple[list[dict[str, Any]], list[int], Turn | None]:
        """Append results, without their images if the model cannot read one. Returns their messages, the tokens, and the turn that they
        continue."""
        try:
            new = render(contents)
            return new, *await self._extend(turn, new, [*messages, *new], tools)
        except ToolFault as fault:
            if all(isinstance(content, str) for content in contents):
                raise
            new = render([self._without_images(content, fault) for content in contents])
            return new, *await self._extend(turn, new, [*messages, *new], tools)

    def _without_images(self, content: str | list[Any], fault: ToolFault) -> str:
        """Return a result without images that the model cannot read."""
        if isinstance(content, str):
            return content
        self.budget.errors += 1
        text = "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
        return f"{text}\n{Outcome.error(f'the result has an image that the model cannot read: {fault}').text}".strip()

    async def _extend(
        self, turn: Turn, new: list[dict[str, Any]], messages: list[dict[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[list[int], Turn | None]:
        """Append ``new``, the last of ``messages``; returns the tokens and the turn that they continue."""
        renderer = self.ask.renderer
        try:
            return await self._tokenize(lambda: renderer.extend(turn.tokens, new, tools), new), turn
        except CannotExtend as error:
            log.debug("sample %s: a new branch, because %s", self.sample.index, error)
            return await self._tokenize(lambda: renderer.render(messages, tools), messages), None

    async def _tokenize(self, function: Callable[[], list[int]], text: Any) -> list[int]:
        """Call a function that tokenizes; a text that cannot be tokenized, or takes too long, fails the sample."""
        try:
            return await tokenize(function, text)
        except CannotExtend:
            raise
        except Exception as error:  # tokenizers raise exceptions of any type
            raise ToolFault(str(error) if isinstance(error, DataError) else describe_error(error)) from error

    async def _answer(self, tokens: list[int], after: Turn | None, media: tuple[Any, ...]) -> Turn | None:
        """Request the next answer; None if the conversation has no room for one."""
        sampling, context = self.ask.sampling, self.loop.context
        room = sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - len(tokens))
        if room < 1:
            if after is None and not self.ask.transcript.turns:
                raise ToolFault(
                    f"its prompt of {len(tokens)} tokens, tools included, leaves no room for an answer within {context} tokens; shorten "
                    "the prompt or offer fewer tools"
                )
            self._stop("context")
            return None
        self._short = room < sampling.max_new_tokens
        stops = (*sampling.stop_token_ids, *self.loop.dialect.stops)
        chosen = dataclasses.replace(sampling, max_new_tokens=room, stop_token_ids=stops)
        if after is None:
            return await self.ask(tokens, sampling=chosen, media=media)
        turn = await self.ask(tokens[len(after.tokens) :], after=after, sampling=chosen, media=media)
        drop_earlier_rows(turn)
        return turn

    def _stop(self, limit: str) -> None:
        self.budget.reached.add(limit)
        self.sample.status = Status.TRUNCATED

    def _read(self, turn: Turn) -> Answer:
        tokens, dialect = turn.response.tokens, self.loop.dialect
        kept = tokens[:-1] if tokens and tokens[-1] in dialect.ends else tokens
        before = str(self.ask.tokenizer.decode(list(turn.prompt[-8:])))
        text = str(self.ask.tokenizer.decode(list(kept)))
        return dialect.read(text, self._parameters, before.rstrip().endswith("<think>"))

    def _name(self, answer: Answer) -> tuple[list[str], list[str]]:
        """Number the calls of an answer; returns their ids and names."""
        first, self._ids = self._ids, self._ids + len(answer.calls)
        ids = [f"call{number:05d}" for number in range(first, self._ids)]
        return ids, [call.name or "unknown" for call in answer.calls]

    def _message(self, answer: Answer, ids: Sequence[str], names: Sequence[str], mode: str) -> dict[str, Any]:
        if mode == "template":
            return self.loop.dialect.message(answer, ids, names)
        calls = [{"name": c.name, "arguments": c.arguments} for c in answer.calls if isinstance(c, Call)]
        return {"role": "assistant", "content": "\n".join([answer.content, *(_tagged(c) for c in calls)]).strip()}

    async def _carry_out(
        self, session: Session, answer: Answer, names: Sequence[str], turn: int
    ) -> list[str | list[Any]]:
        """Execute the calls of an answer concurrently; returns the contents for the model, in order: texts, or parts with images."""
        started = time.monotonic()
        tasks = [
            asyncio.ensure_future(self._call(session, call, position)) for position, call in enumerate(answer.calls)
        ]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.budget.seconds += time.monotonic() - started
        for call, name, (outcome, seconds) in zip(answer.calls, names, outcomes, strict=True):
            arguments = call.arguments if isinstance(call, Call) else None
            entry = {"turn": turn, "name": name, "arguments": arguments, "failed": outcome.failed}
            self.record.append(entry | {"seconds": round(seconds, 4)})
        if any(outcome.broken for outcome, _ in outcomes):
            raise ToolFault(
                f"a method that changes the state of its tool did not return within {self.loop.options.seconds_per_call:g} seconds "
                "(--tool-seconds-per-call)"
            )
        self.budget.errors += sum(outcome.failed for outcome, _ in outcomes)
        return [self._content(outcome) for outcome, _ in outcomes]

    def _content(self, outcome: Outcome) -> str | list[Any]:
        text = self.budget.cut(outcome.text)
        if outcome.parts is None:
            return text
        try:
            parts = read_parts(outcome.parts)
        except DataError as error:
            self.budget.errors += 1
            return f"{text}\n{Outcome.error(f'the result has an image that cannot be read: {error}').text}".strip()
        images = [part for part in parts if isinstance(part, dict) and "media" in part]
        return parts if text == outcome.text else [{"type": "text", "text": text}, *images]

    async def _call(self, session: Session, call: Any, position: int) -> tuple[Outcome, float]:
        if refused := self.budget.refuse(position):
            return Outcome.error(refused), 0.0
        if not isinstance(call, Call):
            self.budget.malformed += 1
            return Outcome.error(f"{call.reason} in: {call.text}"), 0.0
        started = time.perf_counter()
        try:
            limits = (self.budget.seconds_of_call, self.loop.options.chars_per_call)
            outcome = await session.call(call.name, call.arguments, *limits)
        except MilesError as error:
            raise error if isinstance(error, ToolFault) else ToolFault(str(error)) from error
        finally:
            self.loop.clock.record(f"tool {call.name}", started)
        return outcome, time.perf_counter() - started


def _tagged(call: dict[str, Any]) -> str:
    import json

    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False, default=str)}\n</tool_call>"
