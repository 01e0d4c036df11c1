"""Rows to samples: token ids, with a loss mask on what the assistant writes.

Prompt and answer are tokenized separately, as in a rollout: the model continues the tokens of the prompt. An answer to a text ends with the
end-of-sequence token; in a conversation the chat template writes its end. If a template changes earlier answers when the conversation goes
on (some remove their reasoning), the answer that follows becomes another sample of the same rollout, as in multi-turn rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_core.data import Renderer, Row, Sample, Status
from miles_core.plugin import DataError, MilesError, Run
from miles_offline.reward_model import MARGIN
from miles_offline.rows import LABEL, MARGIN_COLUMN, TOOLS


@dataclass
class Encoded:
    """Tokens of one sample, the length of its prompt, and the loss mask of the rest."""

    tokens: list[int]
    prompt: int
    mask: list[int]

    def add_end(self, token: int) -> None:
        """Append a token, whose prediction alone is trained: a trainer computes at it what a head reads from the last token of the text, and
        not the token itself."""
        self.tokens, self.mask = [*self.tokens, token], [*([0] * len(self.mask)), 1]


class Encoder:
    """Converts rows to samples with the run's tokenizer and chat template.

    Args:
        run: the run.

    Raises:
        DataError: from ``encode``; names the row and the column.
    """

    def __init__(self, run: Run) -> None:
        self.tokenizer, self.renderer = run.tokenizer, run.render.renderer
        self.template = run.render
        self.chat = run.config.data.apply_chat_template
        self.limit = longest_text(run)
        self.origin = "--rollout-max-context-len" if run.config.rollout.max_context_len else "the model's context"
        self.vocabulary: int | None = run.plan.fact("model.vocab_size")
        self.scores = run.config.algorithm.advantage_estimator == "reward_model"

    def encode(self, row: Row, group: int, first: int) -> list[Sample]:
        """Return the samples of a row, numbered from ``first``. They share one rollout; the reward is 1, and 0 for the rejected side
        or an answer with the label false."""
        samples: list[Sample] = []
        for column, answer in row.label.items():
            try:
                parts = self._conversation(row.prompt, answer, row.metadata.get(TOOLS))
            except MilesError as error:
                raise DataError(f"{row.place}, column {column!r}: {error}") from error
            if (len(row.label) == 2 or LABEL in row.metadata) and len(parts) > 1:
                raise DataError(
                    f"{row.place}: the chat template changes earlier answers of the column {column!r} when the conversation goes on, so it is "
                    "not one text that can be preferred; give only the last answer in it, and the others in the prompt"
                )
            if not parts:
                raise DataError(
                    f"{row.place}: no message in the column {column!r} after the prompt has the role 'assistant'; remove the row"
                )
            for part in parts:
                self._check(part, row, column)
                response = str(self.tokenizer.decode(part.tokens[part.prompt :]))
                if self.scores:
                    part.add_end(self.tokenizer.eos_token_id)
                samples.append(
                    Sample(
                        prompt=row.prompt,
                        tokens=part.tokens,
                        response=response,
                        response_length=len(part.mask),
                        loss_mask=part.mask,
                        reward=float(row.metadata.get(LABEL, column != "rejected")),
                        status=Status.COMPLETED,
                        group_index=group,
                        index=first + len(samples),
                        rollout_id=first,
                        fields={MARGIN: np.float64(row.metadata.get(MARGIN_COLUMN, 0.0))} if self.scores else {},
                    )
                )
        if len(row.label) == 2 and list(samples[0].tokens) == list(samples[1].tokens):
            raise DataError(
                f"{row.place}: the columns 'chosen' and 'rejected' have the same tokens ({samples[0].response!r:.80}), so the row expresses no "
                "preference; correct or remove it"
            )
        return samples

    def _conversation(self, prompt: Any, answer: Any, tools: list[Any] | None) -> list[Encoded]:
        if isinstance(prompt, str) and isinstance(answer, str) and not self.chat:
            before = self.template(prompt)
            after, end = self.tokenizer(answer, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id
            after += [] if after[-1:] == [end] else [end]
            return [Encoded([*before, *after], len(before), [1] * len(after))]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if self.renderer is None:
            raise DataError(
                "it is a list of messages, and the tokenizer has no chat template; add chat_template.jinja to the checkpoint"
            )
        return encode_messages(self.renderer, [*prompt, *answer], len(prompt), tools)

    def _check(self, part: Encoded, row: Row, column: str) -> None:
        if self.limit is not None and len(part.tokens) > self.limit:
            raise DataError(
                f"{row.place}: with the column {column!r} the row has {len(part.tokens)} tokens ({part.prompt} before the answer), and "
                f"{self.limit} fit ({self.origin}); shorten or remove it"
            )
        if self.vocabulary is not None and max(part.tokens) >= self.vocabulary:
            raise DataError(
                f"{row.place}: the tokenizer gives the column {column!r} the token {max(part.tokens)}, but the model's vocabulary has "
                f"{self.vocabulary} tokens (vocab_size in its config.json); use the tokenizer of this model"
            )


def longest_text(run: Run) -> int | None:
    """Return how many tokens a text may have; None if the model states no limit."""
    return run.config.rollout.max_context_len or run.plan.fact("model.context")


def encode_messages(
    renderer: Renderer, messages: Sequence[Any], first: int, tools: Sequence[Any] | None = None
) -> list[Encoded]:
    """Return the samples of a conversation, in which the assistant messages from number ``first`` on are trained."""
    found: list[Encoded] = []
    for number, message in enumerate(messages):
        if number < first or message["role"] != "assistant":
            continue
        before, answer = renderer.answer(messages[: number + 1], tools)
        if number == len(messages) - 1 and not {*answer} & {*renderer.tokenizer.all_special_ids}:
            # some templates write the end of an answer only at the beginning of the next message
            answer.append(renderer.tokenizer.eos_token_id)
        last = found[-1] if found else None
        if last is not None and before[: len(last.tokens)] == last.tokens:
            last.mask += [0] * (len(before) - len(last.tokens)) + [1] * len(answer)
            last.tokens = before + answer
        else:
            found.append(Encoded(before + answer, len(before), [1] * len(answer)))
    return found
