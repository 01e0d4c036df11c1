"""``--generate environments``: plays episodes; each answer of the model is an action."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from miles_core.chat import drop_earlier_rows, strip_reasoning, take_media, tokenize
from miles_core.data import CannotExtend, Media, Sample, Status, describe_error, number
from miles_core.plugin import Config, DataError, GenerationClient, RolloutFunction, Run, Turn
from miles_environments.environment import EnvironmentFault, Episode, Step, find_answer, instructions_of
from miles_environments.observation import read_observation
from miles_environments.registry import KEY, Member, Registry, registry_of
from miles_environments.threads import silence

log = logging.getLogger(__name__)


class EpisodeLoop(RolloutFunction):
    """Rollout function of environments. A task with a single turn is answered once."""

    def __init__(self, run: Run) -> None:
        self.registry = registry_of(run)
        self.chat = bool(run.config.data.apply_chat_template)
        self.images = self.chat and bool(run.config.data.media)
        self.context = context_of(run.config, run.plan.fact("model.context"))
        self._restore: Any = None

    async def start(self) -> None:
        self._restore = silence()

    async def stop(self) -> None:
        if self._restore is not None:
            self._restore()

    async def __call__(self, sample: Sample, ask: GenerationClient) -> list[Sample]:
        member, info = self.registry.find(sample)
        if not member.environment.several_turns:
            await ask()
            return ask.transcript.samples(sample)
        play = Play(self, member, sample, ask)
        fault = 0.0
        try:
            await play.run(info["number"], info["level"])
        except EnvironmentFault as error:
            log.warning("sample %s fails: %s", sample.index, error)
            sample.status, fault = Status.FAILED, 1.0
        finally:
            await play.close()
        ask.metrics |= {
            "environments/turns": float(len(play.rewards)),
            "environments/seconds": play.seconds,
            "environments/finished": float(play.done),
            "environments/failed_episodes": fault,
        }
        sample.metadata["episode"] = {"reward": math.fsum(play.rewards), "rewards": play.rewards, "done": play.done}
        return ask.transcript.samples(sample) or [sample]


def context_of(config: Config, model: Any) -> int | None:
    """Return the largest number of tokens of a conversation; None if it is unknown."""
    return config.rollout.max_context_len or (int(model) if model is not None else None)


class Play:
    """One episode.

    Attributes:
        rewards: the reward of each step.
        seconds: time in the environment.
        done: whether the episode came to its end.
    """

    def __init__(self, loop: EpisodeLoop, member: Member, sample: Sample, ask: GenerationClient) -> None:
        self.loop, self.member, self.sample, self.ask = loop, member, sample, ask
        self.rewards: list[float] = []
        self.seconds, self.done = 0.0, False
        self._episode: Episode | None = None
        self._broken = False

    @property
    def registry(self) -> Registry:
        """The environments of the run."""
        return self.loop.registry

    async def run(self, number: int, level: int) -> None:
        """Play until the episode ends or a limit is reached.

        Raises:
            EnvironmentFault: the environment raised, blocked, or returned something that is neither an observation nor a reward.
        """
        environment = self.member.environment
        self._episode = await self._call("opening an episode", lambda: environment.open(number, level))
        first = self._read(await self._call("reset", self._episode.reset))
        system = instructions_of(self.member.entry, environment, self._episode)
        messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": first}]
        self.sample.prompt, media = take_media(messages)
        self.sample.media = media
        tokens, turn = await self._tokenize(lambda: self._render(messages), messages), None
        limit = self.member.entry.turns or self.registry.options.turns
        for count in range(limit):
            turn = await self._answer(tokens, turn, media)
            if turn is None or turn.response.finish != "stop":
                return
            step = await self._step(turn)
            if step.done:
                self.done = True
                return
            if count + 1 < limit:
                messages += [
                    {"role": "assistant", "content": turn.response.text},
                    {"role": "user", "content": step.text},
                ]
                tokens, turn = await self._extend(turn, messages)
                media = take_media(messages if turn is None else messages[-1:])[1]
        self.sample.status = Status.TRUNCATED

    async def _step(self, turn: Turn) -> Step:
        assert self._episode is not None  # made before the first turn
        action = find_answer(strip_reasoning(turn.response.text), self.member.answer) or ""
        episode = self._episode
        step = await self._call("step", lambda: episode.step(action))
        if not isinstance(step, Step):
            raise EnvironmentFault(f"{self._name}: step returned {step!r:.80}; it returns a Step")
        try:
            reward = number(step.reward, None)
        except DataError as error:
            raise EnvironmentFault(f"{self._name}: the reward that step returned {error}") from error
        try:
            done = bool(step.done)
        except Exception as error:  # an array of several values
            raise EnvironmentFault(
                f"{self._name}: step returned done={step.done!r:.40}; it is True or False"
            ) from error
        self.rewards.append(reward)
        return Step("" if done else self._read(step.text), reward, done)

    def _read(self, given: Any) -> Any:
        try:
            return read_observation(given, self.registry.options.chars, self.loop.images)
        except DataError as error:
            raise EnvironmentFault(f"{self._name}: the observation {error}") from error

    @property
    def _name(self) -> str:
        return f"the environment {self.member.entry.label}, task {self.sample.metadata[KEY]['number']}"

    async def _call(self, what: str, function: Any) -> Any:
        started = time.monotonic()
        try:
            return await self.registry.calls(f"{self._name}: {what}", function)
        except BaseException:
            self._broken = True  # its thread may still be running
            raise
        finally:
            self.seconds += time.monotonic() - started

    async def close(self) -> None:
        """Close the episode; a failure to close is logged."""
        if self._episode is None:
            return
        try:
            await asyncio.shield(self.registry.calls(f"{self._name}: close", self._episode.close))
        except EnvironmentFault as error:
            log.log(logging.DEBUG if self._broken else logging.WARNING, "sample %s: %s", self.sample.index, error)

    def _render(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.loop.chat:
            return self.ask.renderer.render(messages)
        text = "\n".join(message["content"] for message in messages) + "\n"
        return list(self.ask.tokenizer.encode(text))

    async def _extend(self, turn: Turn, messages: list[dict[str, Any]]) -> tuple[list[int], Turn | None]:
        """Append the last observation; returns the tokens and the turn that they continue."""
        new, ask = messages[-1:], self.ask
        if not self.loop.chat:
            text = f"\n{new[0]['content']}\n"
            added = await self._tokenize(lambda: list(ask.tokenizer.encode(text, add_special_tokens=False)), text)
            return [*turn.tokens, *added], turn
        try:
            return await self._tokenize(lambda: ask.renderer.extend(turn.tokens, new), new), turn
        except CannotExtend as error:
            log.debug("sample %s: a new branch, because %s", self.sample.index, error)
            return await self._tokenize(lambda: ask.renderer.render(messages), messages), None

    async def _tokenize(self, function: Callable[[], list[int]], text: Any) -> list[int]:
        """Call a function that tokenizes; a text that cannot be tokenized, or takes too long, fails the sample."""
        try:
            return await tokenize(function, text)
        except CannotExtend:
            raise
        except Exception as error:  # tokenizers raise exceptions of any type
            why = str(error) if isinstance(error, DataError) else describe_error(error)
            raise EnvironmentFault(f"{self._name}: {why}") from error

    async def _answer(self, tokens: list[int], after: Turn | None, media: Sequence[Media]) -> Turn | None:
        """Request the next answer; None if the conversation has no room for one. ``media`` belong to the tokens after the turn."""
        sampling, context = self.ask.sampling, self.loop.context
        room = sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - len(tokens))
        if room < 1:
            if not self.ask.transcript.turns:
                raise EnvironmentFault(
                    f"{self._name}: its first observation leaves no room for an answer within {context} tokens"
                )
            self.sample.status = Status.TRUNCATED
            return None
        chosen = dataclasses.replace(sampling, max_new_tokens=room)
        if after is None:
            return await self.ask(tokens, sampling=chosen, media=media)
        turn = await self.ask(tokens[len(after.tokens) :], after=after, sampling=chosen, media=media)
        drop_earlier_rows(turn)
        return turn
