"""How a rollout function talks to the engines: ``turn = await ask(...)`` continues the sample's transcript."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.contracts.engine import Response, Sampling
from miles_core.data.renderer import Message, Renderer
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, DataError
from miles_core.rollout.generated import sampling_of
from miles_core.rollout.transcript import Transcript, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: ``(tokens, sampling, policy) -> response``; the call takes its key for random numbers at once, the answer comes later.
Generation = Callable[[list[int], Sampling, str], Awaitable[Response]]


class Ask:
    """The engines, as one sample's rollout function sees them.

    Attributes:
        sample: number of the sample.
        transcript: all turns so far.
        sampling: the run's sampling parameters: those of training or of evaluation.
        tokenizer: of the model.
        policy: name of the policy that answers unless another one is named.
        metrics: numbers about this rollout, NAME -> value; their means over a step are metrics of the run.
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

    @property
    def renderer(self) -> Renderer:
        """The chat template of the model.

        Raises:
            ConfigError: the tokenizer has none.
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
        """Let an engine answer; the turn that it returns is part of ``transcript``.

        Args:
            tokens: with ``after``, the token ids that follow that turn; without, all token ids from the beginning. They continue
                the turn whose tokens they begin with, or begin another branch. Without ``tokens`` and ``messages``: the
                sample's prompt.
            messages: the same as chat messages, rendered by the model's chat template.
            after: the turn to continue.
            tools: tool schemas for the chat template.
            sampling: entries that differ from ``self.sampling``.
            policy: name of the policy that answers.

        Raises:
            CannotExtend: the chat template cannot append these messages to the turn (see ``Renderer.extend``); ask with all
                messages of the conversation instead, which begins another branch.
            DataError: arguments that contradict each other.
        """
        if tokens is not None and messages is not None:
            raise DataError("ask takes token ids or messages, not both")
        if isinstance(tokens, str):
            raise DataError("ask takes token ids, not text: ask.tokenizer.encode(text)")
        chosen = sampling_of(sampling, self.sampling)
        if messages is not None:
            tokens = self._rendered(messages, after, tools)
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
        except Exception as error:
            self.failures.append(error)  # the engine's, not the rollout function's
            raise
        return self.transcript.add(parent, tokens[parent.end if parent else 0 :], response, policy)

    def _rendered(self, messages: Sequence[Message], after: Turn | None, tools: Sequence[Any] | None) -> list[int]:
        if after is None:
            return self.renderer.render(messages, tools)
        if after.response.finish == "length":
            raise DataError(
                f"sample {self.sample}: the answer reached its length limit, so no message can follow it; end the sample there"
            )
        return self.renderer.extend(after.tokens, messages, tools)
