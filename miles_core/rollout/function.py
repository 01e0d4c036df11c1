"""Rollout functions generate the samples of a prompt: with a single turn, or as an agent with tools.

The provider of ``--generate NAME`` returns a ``RolloutFunction`` or an async function with the same arguments. The function
is called once per sample and sends its requests through ``ask``, which records every turn.
``turn = await ask(...)`` sends a request to the engine and adds the turn to the sample's transcript.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.chat.media_parts import attach_media, take_media
from miles_core.chat.renderer import Message, Renderer
from miles_core.contracts.engine import Response, Sampling
from miles_core.data.column import TOKENS, Column, as_column
from miles_core.data.media import Media
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, DataError, PluginError, describe
from miles_core.rollout.continuation import merge_sampling
from miles_core.rollout.transcript import Transcript, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from miles_core.contracts.run import Run


#: ``(tokens, sampling, policy, media) -> response``. The call reserves its request key immediately; the response is awaited.
Generation = Callable[[list[int], Sampling, str, tuple[Media, ...]], Awaitable[Response]]


class GenerationClient:
    """Sends the requests of one sample to the engines and records the turns.

    Attributes:
        sample: number of the sample.
        transcript: all turns so far.
        sampling: the run's sampling parameters, for training or for evaluation.
        tokenizer: tokenizer of the model.
        policy: name of the default policy.
        metrics: metrics of this rollout, name -> value; the run reports their means over a step.
    """

    def __init__(
        self,
        sample: Sample,
        policy: str,
        generation: Generation,
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Renderer | None,
        decode: Callable[[Sequence[int]], str],
        learns: Callable[[str], bool] = lambda policy: True,
    ) -> None:
        self._sample, self._generation, self._renderer = sample, generation, renderer
        self._prompt, self._media = sample.tokens[:], sample.media
        self.sample, self.policy, self.sampling, self.tokenizer = sample.index, policy, sampling, tokenizer
        self.transcript = Transcript(sample.index, decode, learns)
        self.metrics: dict[str, float] = {}
        self.failures: list[Exception] = []
        self.abandoned = False  # whether a call was cancelled while its engine may still compute it

    @property
    def renderer(self) -> Renderer:
        """Renderer of the model's chat template.

        Raises:
            ConfigError: the tokenizer has no chat template.
        """
        if self._renderer is None:
            raise ConfigError(
                "messages cannot be rendered: the tokenizer of this model has no chat template; add chat_template.jinja to the "
                "checkpoint, or continue by token ids"
            )
        return self._renderer

    def __call__(
        self,
        tokens: Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        after: Turn | None = None,
        tools: Sequence[Any] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        policy: str = "",
        media: Sequence[Media] | None = None,
    ) -> Awaitable[Turn]:
        """Request a response from an engine; the returned turn is added to ``transcript``.

        Args:
            tokens: the token ids that follow ``after``; without it, all token ids from the beginning: they continue the longest recorded turn
                that is a prefix of them, or start a new branch. Without tokens and messages, the request is the sample's prompt.
            messages: chat messages instead of token ids, rendered with the model's chat template.
            after: the turn to continue.
            tools: tool schemas for the chat template.
            sampling: entries that override ``self.sampling``.
            policy: name of the policy that generates; "" for the default policy.
            media: media of the placeholders in ``tokens``, in order. By default those in the parts of ``messages``, otherwise those of the
                sample's prompt or of the turn that the request continues.

        Raises:
            CannotExtend: the chat template cannot append these messages to the turn (see ``Renderer.extend``); pass all messages
                of the conversation instead, which starts a new branch.
            DataError: the arguments contradict each other.
        """
        if tokens is not None and messages is not None:
            raise DataError("ask takes token ids or messages, not both")
        if isinstance(tokens, str):
            raise DataError("ask takes token ids, not text: ask.tokenizer.encode(text)")
        chosen = merge_sampling(sampling, self.sampling)
        if messages is not None:
            media = take_media(messages)[1]
            if after is None and not media:
                messages, media = attach_media(messages, self._media), self._media
            tokens = self._render(messages, after, tools)
        elif tokens is None:
            if after is not None:
                raise DataError("ask(after=turn) needs the tokens or messages that follow the turn")
            tokens = self._prompt
        elif after is not None:
            tokens = after.tokens + tokens
        parent = after if after is not None else self.transcript.find(tokens)
        whole, policy = as_column(tokens, TOKENS), policy or self.policy
        held = self._media_of(parent, after, media)
        return self._record(parent, whole, policy, held, self._generation(whole, chosen, policy, held))

    def _media_of(self, parent: Turn | None, after: Turn | None, media: Sequence[Media] | None) -> tuple[Media, ...]:
        """Return all media of a request that continues ``parent``; ``media`` are those of its tokens."""
        if after is not None:
            return (*after.media, *(media or ()))
        return tuple(media) if media is not None else self._media if parent is None else parent.media

    async def _record(
        self, parent: Turn | None, tokens: Column, policy: str, media: tuple[Media, ...], answer: Awaitable[Response]
    ) -> Turn:
        try:
            response = await answer
        except asyncio.CancelledError:
            self.abandoned = True
            raise
        except Exception as error:
            self.failures.append(error)  # marks it as an error of the engine, not of the rollout function
            raise
        return self.transcript.add(parent, tokens[parent.end if parent else 0 :], response, policy, media)

    def _render(self, messages: Sequence[Message], after: Turn | None, tools: Sequence[Any] | None) -> list[int]:
        if after is None:
            return self.renderer.render(messages, tools)
        if after.response.finish == "length":
            raise DataError(
                f"sample {self.sample}: the answer reached its length limit, so no message can follow it; end the sample there"
            )
        return self.renderer.extend(after.tokens, messages, tools)


log = logging.getLogger(__name__)

#: The rollout function of core: ``--generate turn``.
TURN = "turn"


class RolloutFunction(ABC):
    """Generates the samples of one prompt.

    Attributes:
        roles: roles of the messages that the function appends after the model's turns, such as ``("tool",)``. The run checks at
            start that the chat template supports them.
    """

    roles: tuple[str, ...] = ()

    async def start(self) -> None:
        """Start resources that all samples share (a server, a pool of sandboxes). Called before the first sample, and again after
        ``stop`` when the run recovers from a lost worker."""

    async def stop(self) -> None:
        """Release the shared resources. Called after the last sample however the run ends, and also if ``start`` failed."""

    @abstractmethod
    async def __call__(self, sample: Sample, ask: GenerationClient) -> Sample | list[Sample]:
        """Generate the samples of one prompt; ``sample`` holds the prompt (``prompt``, ``tokens``, ``label``, ``metadata``).

        Many calls run concurrently. A call is cancelled when its sample is dropped: release the sample's resources in ``finally``
        or with ``async with``; the run waits for the release. If a tool fails, set ``status`` to FAILED: the sample is then not
        trained on. An exception ends the run.

        Returns:
            ``ask.transcript.samples(sample)``, or samples whose tokens are concatenated from the tokens of turns.
        """


class PlainFunction(RolloutFunction):
    """Adapts an async function ``(sample, ask) -> samples`` to a rollout function."""

    def __init__(self, function: Callable[[Sample, GenerationClient], Awaitable[Any]]) -> None:
        self.function = function

    async def __call__(self, sample: Sample, ask: GenerationClient) -> Any:
        return await self.function(sample, ask)


class SingleTurn(RolloutFunction):
    """``--generate turn``: generates one response to the prompt."""

    async def __call__(self, sample: Sample, ask: GenerationClient) -> Sample:
        turn = await ask()
        sample.tokens = turn.tokens
        sample.response_length = len(turn.response.tokens)
        sample.response = turn.response.text
        return sample


def to_rollout_function(made: Any, label: str) -> RolloutFunction:
    """Convert the value that a provider of ``--generate`` returned to a rollout function. ``label`` names the provider in messages.

    Raises:
        PluginError: the value is neither a ``RolloutFunction`` nor an async function.
    """
    if isinstance(made, RolloutFunction):
        return made
    if not inspect.iscoroutinefunction(made):
        raise PluginError(
            f"{label}: it returned {describe(made)}; expected a RolloutFunction, or an async function (sample, ask)"
        )
    return PlainFunction(made)


def check_roles(run: Run, name: str, function: RolloutFunction) -> None:
    """Check that the chat template supports the roles of ``function``; log a warning if appending a message changes earlier text.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not support a role.
    """
    renderer = run.render.renderer
    for role in function.roles:
        if renderer is None:
            raise ConfigError(
                f"--generate {name} appends messages of the role {role}, and the tokenizer of {run.config.model.hf_checkpoint} has no chat "
                "template; add chat_template.jinja to the checkpoint"
            )
        effect = renderer.examine(role)
        if effect == "refuses":
            raise ConfigError(
                f"--generate {name} appends messages of the role {role}, and the chat template of {run.config.model.hf_checkpoint} refuses "
                "them; use a model whose template has this role"
            )
        if effect != "appends":
            what = "removes the reasoning of earlier answers" if effect == "drops reasoning" else "changes earlier text"
            log.warning(
                "the chat template %s when a message of the role %s follows: such a message starts a new branch, for which the "
                "whole conversation is rendered again",
                what,
                role,
            )
