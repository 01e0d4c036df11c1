"""The interface of rollout functions to the engines: ``turn = await ask(...)`` adds a turn to the sample's transcript."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.contracts.engine import Response, Sampling
from miles_core.data.renderer import Message, Renderer
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, DataError
from miles_core.rollout.generated import merge_sampling
from miles_core.rollout.transcript import Transcript, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: ``(tokens, sampling, policy) -> response``. The call reserves its request key immediately; the response is awaited.
Generation = Callable[[list[int], Sampling, str], Awaitable[Response]]


class Ask:
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
        decode: Callable[[list[int]], str],
        learns: Callable[[str], bool] = lambda policy: True,
    ) -> None:
        self._sample, self._generation, self._renderer = sample, generation, renderer
        self._prompt = list(sample.tokens)
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
    ) -> Awaitable[Turn]:
        """Request a response from an engine; the returned turn is added to ``transcript``.

        Args:
            tokens: with ``after``, the token ids that follow that turn; otherwise all token ids from the beginning. In that case
                they continue the longest recorded turn that is a prefix of them, or start a new branch. If ``tokens`` and
                ``messages`` are both None, the request is the sample's prompt.
            messages: chat messages instead of token ids, rendered with the model's chat template.
            after: the turn to continue.
            tools: tool schemas for the chat template.
            sampling: entries that override ``self.sampling``.
            policy: name of the policy that generates; "" for the default policy.

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
            tokens = self._render(messages, after, tools)
        elif tokens is None:
            if after is not None:
                raise DataError("ask(after=turn) needs the tokens or messages that follow the turn")
            tokens = self._prompt
        elif after is not None:
            tokens = [*after.tokens, *tokens]
        parent = after if after is not None else self.transcript.find(tokens)
        whole = list(tokens)
        policy = policy or self.policy
        answer = self._generation(whole, chosen, policy)
        return self._record(parent, whole, policy, answer)

    async def _record(self, parent: Turn | None, tokens: list[int], policy: str, answer: Awaitable[Response]) -> Turn:
        try:
            response = await answer
        except asyncio.CancelledError:
            self.abandoned = True
            raise
        except Exception as error:
            self.failures.append(error)  # marks it as an error of the engine, not of the rollout function
            raise
        return self.transcript.add(parent, tokens[parent.end if parent else 0 :], response, policy)

    def _render(self, messages: Sequence[Message], after: Turn | None, tools: Sequence[Any] | None) -> list[int]:
        if after is None:
            return self.renderer.render(messages, tools)
        if after.response.finish == "length":
            raise DataError(
                f"sample {self.sample}: the answer reached its length limit, so no message can follow it; end the sample there"
            )
        return self.renderer.extend(after.tokens, messages, tools)
