"""Opening a file of prompts as the options say, and looking at every one of them before the run begins."""

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
    """What the model can take.

    Attributes:
        context: tokens of prompt and response together; None where it is not known.
        origin: where that number comes from.
        vocabulary: token ids are below this; None where it is not known.
    """

    context: int | None = None
    origin: str = ""
    vocabulary: int | None = None

    @classmethod
    def of(cls, config: Config, context: int | None, origin: str, vocabulary: int | None) -> Limits:
        """``--rollout-max-context-len``, else the model's own context (the fact ``model.context``)."""
        if config.rollout.max_context_len:
            return cls(config.rollout.max_context_len, "--rollout-max-context-len", vocabulary)
        return cls(context, f"the model's context, {origin}", vocabulary)


NO_LIMITS = Limits()

#: The prompt source of core: ``--prompts file``.
FILE = "file"


def encoded(render: PromptTemplate, row: Row, limits: Limits) -> list[int]:
    """Token ids of a row's prompt.

    Raises:
        DataError: the template or the tokenizer refuses it, or a token is not the model's; names the row.
    """
    try:
        tokens = render(row.prompt)
    except MilesError as error:
        raise DataError(f"{row.place}: {error}") from error
    except Exception as error:  # tokenizers raise whatever they like
        raise DataError(
            f"{row.place}: the tokenizer cannot encode the prompt ({type(error).__name__}: {error}); correct or remove the row"
        ) from error
    if limits.vocabulary is not None and max(tokens) >= limits.vocabulary:
        raise DataError(
            f"{row.place}: the tokenizer gives the prompt the token {max(tokens)}, and the model knows {limits.vocabulary} "
            "(vocab_size in its config.json): tokenizer and model do not belong together"
        )
    return tokens


def fitting(render: PromptTemplate, row: Row, config: Config, limits: Limits) -> list[int] | None:
    """Token ids of a row's prompt; None where they are more than ``--rollout-max-prompt-len``.

    Raises:
        DataError: see ``encoded``; no token of a response fits after it.
    """
    tokens = encoded(render, row, limits)
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
    """The rows of ``paths``, keys and values checked; ``flag`` is what names them, for messages."""
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
    """Render every prompt once; those beyond ``--rollout-max-prompt-len`` are left out and counted.

    Takes about as long as tokenising the files.

    Args:
        prompts: as ``open_prompts`` made them.
        render: prompt -> token ids.
        config: for ``--rollout-max-prompt-len``.
        limits: of the model.
        flag: what names the prompts, for messages.
        check: a further look at each row; raises DataError.

    Raises:
        DataError: see ``encoded``; a prompt too long for the model; what ``check`` raises; no prompt is left.
    """
    longest = config.rollout.max_prompt_len
    kept: list[int] = []
    lengths: list[tuple[int, str]] = []
    for number, row in enumerate(prompts):
        tokens = encoded(render, row, limits)
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
        log.info("%s: %d prompts are longer than --rollout-max-prompt-len and left out", flag, dropped)


def _refuse_long(lengths: list[tuple[int, str]], limits: Limits, flag: str) -> None:
    """A prompt that leaves no room for a token of the response is of no use."""
    too_long = [item for item in lengths if limits.context is not None and item[0] >= limits.context]
    if too_long:
        longest, place = max(too_long)
        raise DataError(
            f"{flag}: {len(too_long)} of {len(lengths)} prompts leave no room for a response within {limits.context} tokens "
            f"({limits.origin}); the longest has {longest} ({place}); shorten them, or leave them out with "
            "--rollout-max-prompt-len"
        )
