"""Opens prompt files as configured and validates every prompt before the run starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles_core.config.config import Config
from miles_core.data.prompt_source import Row
from miles_core.data.prompts import Prompts
from miles_core.data.template import PromptTemplate
from miles_core.errors import ConfigError, DataError, MilesError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Limits of the model.

    Attributes:
        context: maximum number of tokens of prompt and response together; None if unknown.
        origin: source of ``context``, for messages.
        vocabulary: vocabulary size; None if unknown.
    """

    context: int | None = None
    origin: str = ""
    vocabulary: int | None = None

    @classmethod
    def of(cls, config: Config, context: int | None, origin: str, vocabulary: int | None) -> Limits:
        """Build limits whose context is ``--rollout-max-context-len`` if set, otherwise the model's (the fact ``model.context``)."""
        if config.rollout.max_context_len:
            return cls(config.rollout.max_context_len, "--rollout-max-context-len", vocabulary)
        return cls(context, f"the model's context, {origin}", vocabulary)


NO_LIMITS = Limits()

#: The prompt source of core: ``--prompts file``.
FILE = "file"


def encode_prompt(render: PromptTemplate, row: Row, limits: Limits) -> list[int]:
    """Return the token ids of a row's prompt.

    Raises:
        DataError: the template or the tokenizer rejects the prompt, or a token id exceeds the vocabulary. Names the row.
    """
    try:
        tokens = render(row.prompt)
    except MilesError as error:
        raise DataError(f"{row.place}: {error}") from error
    except Exception as error:  # tokenizers raise exceptions of any type
        raise DataError(
            f"{row.place}: the tokenizer cannot encode the prompt ({type(error).__name__}: {error}); correct or remove the row"
        ) from error
    if limits.vocabulary is not None and max(tokens) >= limits.vocabulary:
        raise DataError(
            f"{row.place}: the tokenizer gives the prompt the token {max(tokens)}, but the model's vocabulary has {limits.vocabulary} "
            "tokens (vocab_size in its config.json): tokenizer and model do not match; use the tokenizer of this model"
        )
    return tokens


def encode_within_limits(render: PromptTemplate, row: Row, config: Config, limits: Limits) -> list[int] | None:
    """Return the token ids of a row's prompt; None if it is longer than ``--rollout-max-prompt-len``.

    Raises:
        DataError: see ``encode_prompt``; or the prompt leaves no room for a response within the context.
    """
    tokens = encode_prompt(render, row, limits)
    longest = config.rollout.max_prompt_len
    if longest is not None and len(tokens) > longest:
        return None
    if limits.context is not None and len(tokens) >= limits.context:
        raise DataError(
            f"{row.place}: the prompt of {len(tokens)} tokens leaves no room for a response within {limits.context} tokens "
            f"({limits.origin}); shorten it, or leave such prompts out with --rollout-max-prompt-len"
        )
    return tokens


def open_prompts(config: Config, paths: Any, flag: str, shuffle: bool = False) -> Prompts:
    """Open the prompt files ``paths`` and check their keys and values. Messages name ``flag``, the option with the paths."""
    data = config.data
    if not paths:
        raise ConfigError(f"no prompts: give {flag} FILE (JSONL or parquet)")
    return Prompts(
        paths,
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        shuffle=shuffle,
        seed=config.train.seed,
    )


def examine(
    prompts: Prompts,
    render: PromptTemplate,
    config: Config,
    limits: Limits,
    flag: str,
    check: Callable[[Row], None] | None = None,
) -> None:
    """Render every prompt once, and drop prompts longer than ``--rollout-max-prompt-len`` from ``prompts``; log their number.

    Takes about as long as tokenising the files.

    Args:
        prompts: result of ``open_prompts``.
        render: prompt -> token ids.
        config: for ``--rollout-max-prompt-len``.
        limits: limits of the model.
        flag: option with the paths, for messages.
        check: additional check of each row; raises DataError.

    Raises:
        DataError: see ``encode_prompt``; or a prompt is too long for the model, ``check`` raised, or no prompt remains.
    """
    longest = config.rollout.max_prompt_len
    kept: list[int] = []
    lengths: list[tuple[int, str]] = []
    for number, row in enumerate(prompts):
        tokens = encode_prompt(render, row, limits)
        if check is not None:
            check(row)
        if longest is None or len(tokens) <= longest:
            kept.append(number)
            lengths.append((len(tokens), row.place))
    dropped = len(prompts) - len(kept)
    if not kept:
        raise DataError(f"{flag}: all {dropped} prompts are longer than --rollout-max-prompt-len {longest}")
    _refuse_long(lengths, limits, flag)
    if dropped:
        prompts.restrict(kept)
        log.info("%s: dropped %d prompts that are longer than --rollout-max-prompt-len", flag, dropped)


def _refuse_long(lengths: list[tuple[int, str]], limits: Limits, flag: str) -> None:
    """Raise DataError if a prompt leaves no room for a single response token."""
    too_long = [item for item in lengths if limits.context is not None and item[0] >= limits.context]
    if too_long:
        longest, place = max(too_long)
        raise DataError(
            f"{flag}: {len(too_long)} of {len(lengths)} prompts leave no room for a response within {limits.context} tokens "
            f"({limits.origin}); the longest has {longest} ({place}); shorten them, or leave them out with "
            "--rollout-max-prompt-len"
        )
