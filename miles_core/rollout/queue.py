"""Queue of prompts: renders and numbers prompts, tracks those in use, and accepts unused prompts back."""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from miles_core.config.config import Config
from miles_core.data.column import TOKENS, Column, as_column
from miles_core.data.media import Media
from miles_core.data.parquet import ParquetFile
from miles_core.data.prompt_index import sample_rows
from miles_core.data.prompt_source import PromptSource, Row
from miles_core.data.prompts import Prompts, PromptTemplate
from miles_core.data.sample import Sample
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
#: ``render(rows)``: the token ids of each row's prompt, or None to leave the row out.
RenderRows = Callable[[Sequence[Row]], list[Sequence[int] | None]]
#: Prompts that are tokenised together.
_AT_ONCE = 1024

#: The prompt source of core: ``--prompts file``.
FILE = "file"


def encode_prompt(render: PromptTemplate, row: Row, limits: Limits, encoded: list[int] | None = None) -> list[int]:
    """Return the token ids of a row's prompt; ``encoded`` as for ``PromptTemplate``.

    Raises:
        DataError: the template or the tokenizer rejects the prompt, or a token id exceeds the vocabulary. Names the row.
    """
    try:
        if row.media:
            tokens = render(row.prompt, encoded, row.media)
        else:
            tokens = render(row.prompt) if encoded is None else render(row.prompt, encoded)
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


def encode_rows(
    render: PromptTemplate, config: Config, limits: Limits, check: Callable[[Row], None] | None = None
) -> RenderRows:
    """Return the function that renders rows. The result is None for a prompt that is longer than ``--rollout-max-prompt-len``, and for an
    invalid row (also by ``check``) that was not examined before the run; such rows are logged.

    The function raises DataError: see ``encode_prompt``; or the prompt leaves no room for a response within the context.
    """
    longest = config.rollout.max_prompt_len

    def encode(row: Row, text: list[int] | None) -> Sequence[int] | None:
        if row.place in render.known:
            return render.known[row.place]
        try:
            if row.fault:
                raise DataError(row.fault)
            if check is not None and not row.examined:
                check(row)
            tokens = encode_prompt(render, row, limits, text)
            if longest is not None and len(tokens) > longest:
                return None
            if limits.context is not None and len(tokens) >= limits.context:
                raise DataError(
                    f"{row.place}: the prompt of {len(tokens)} tokens leaves no room for a response within {limits.context} tokens "
                    f"({limits.origin}); shorten it, or leave such prompts out with --rollout-max-prompt-len"
                )
            return tokens
        except DataError as error:
            if row.examined:
                raise
            log.warning("%s. The row is left out", error)
            return None

    def encode_all(rows: Sequence[Row]) -> list[Sequence[int] | None]:
        texts = iter(render.encode_texts([row.prompt for row in rows if row.place not in render.known]))
        return [encode(row, None if row.place in render.known else next(texts)) for row in rows]

    return encode_all


def open_prompts(config: Config, paths: Any, flag: str, shuffle: bool = False, label_key: str | None = None) -> Prompts:
    """Open the prompt files ``paths`` and check their keys and values. Messages name ``flag``, the option with the paths. ``label_key``
    replaces ``--label-key``."""
    data = config.data
    if not paths:
        raise ConfigError(f"no prompts: give {flag} FILE (JSONL or parquet)")
    return Prompts(
        paths,
        input_key=data.input_key,
        label_key=label_key or data.label_key,
        metadata_key=data.metadata_key,
        shuffle=shuffle,
        seed=config.train.seed,
        open_parquet=ParquetFile,
        media=data.media,
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

    Takes about as long as tokenising the files; ``encode_rows`` does not tokenise these prompts again. Of large files, a sample is rendered
    (``sample_rows``); ``encode_rows`` leaves out the long prompts when they are read.

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
    examined = sample_rows(len(prompts))
    lengths = _measure(prompts, examined, render, limits, flag, check)
    kept = np.flatnonzero(lengths <= (lengths.max() if longest is None else longest))
    dropped = len(examined) - len(kept)
    if not len(kept):
        raise DataError(f"{flag}: all {dropped} prompts are longer than --rollout-max-prompt-len {longest}")
    if limits.context is not None and (too_long := kept[lengths[kept] >= limits.context]).size:
        worst = int(too_long[lengths[too_long].argmax()])
        raise DataError(
            f"{flag}: {len(too_long)} of {len(kept)} prompts leave no room for a response within {limits.context} tokens "
            f"({limits.origin}); the longest has {lengths[worst]} ({prompts[examined[worst]].place}); shorten them, or leave them out "
            "with --rollout-max-prompt-len"
        )
    if not prompts.examined:
        log.info("%s: checked %d prompts; the others are checked when they are read", flag, len(examined))
    elif dropped:
        prompts.restrict(kept.tolist())
        log.info("%s: dropped %d prompts that are longer than --rollout-max-prompt-len", flag, dropped)


def _measure(
    prompts: Prompts,
    examined: Sequence[int],
    render: PromptTemplate,
    limits: Limits,
    flag: str,
    check: Callable[[Row], None] | None,
) -> np.ndarray:
    """Render and check the rows ``examined`` for ``examine``; return their tokens, int64 [rows]."""
    lengths = np.zeros(len(examined), np.int64)
    resumed: list[str] = []
    for start in range(0, len(examined), _AT_ONCE):
        some = [prompts[index] for index in examined[start : start + _AT_ONCE]]
        texts = render.encode_texts([row.prompt for row in some])
        for number, (row, text) in enumerate(zip(some, texts, strict=True), start):
            tokens = encode_prompt(render, row, limits, text)
            lengths[number] = len(tokens)
            if prompts.examined and not row.media:
                render.known[row.place] = as_column(tokens, TOKENS)
            if check is not None:
                check(row)
            if isinstance(row.prompt, list) and row.prompt[-1].get("role") == "assistant":
                resumed.append(row.place)
    if resumed:
        log.warning(
            "%s: %d prompts end with an assistant message, which the response continues; the first is %s",
            flag,
            len(resumed),
            resumed[0],
        )
    return lengths


#: The run stops after this many consecutive rows were skipped.
GIVE_UP = 1000


@dataclass(frozen=True)
class Prompt:
    """One prompt with its token ids; samples made from it share ``group_index``."""

    text: str | list[dict[str, Any]]
    tokens: Column
    label: Any
    metadata: dict[str, Any]
    group_index: int
    policy: str = ""
    media: tuple[Media, ...] = ()

    @classmethod
    def of(cls, row: Row, tokens: Sequence[int], group_index: int) -> Prompt:
        """Make the prompt of a row with its token ids."""
        return cls(
            row.prompt, as_column(tokens, TOKENS), row.label, dict(row.metadata), group_index, row.policy, row.media
        )

    def samples(self, count: int) -> Sequence[Sample]:
        """Create ``count`` pending samples, numbered from ``group_index * count``."""
        return Sample.make_pending(
            self.indexes(count),
            prompt=self.text,
            tokens=self.tokens,
            label=self.label,
            metadata=self.metadata,
            group_index=self.group_index,
            policy=self.policy,
            media=self.media,
        )

    def indexes(self, count: int) -> range:
        """Return the indexes of the ``count`` samples of this prompt."""
        return range(self.group_index * count, (self.group_index + 1) * count)

    def to_json(self) -> dict[str, Any]:
        """Return all fields except ``group_index``; token ids are int32 in base64."""
        data = {"text": self.text, "tokens": b64encode(self.tokens).decode(), "label": self.label}
        data |= {"metadata": self.metadata} | ({"policy": self.policy} if self.policy else {})
        return data | ({"media": [media.to_json() for media in self.media]} if self.media else {})

    @classmethod
    def from_json(cls, data: dict[str, Any], group_index: int = -1) -> Prompt:
        """Inverse of ``to_json``, with the given ``group_index``."""
        saved, policy = data["tokens"], data.get("policy", "")
        tokens = Column(TOKENS, b64decode(saved) if isinstance(saved, str) else saved)  # earlier versions: a list
        media = tuple(map(Media.from_json, data.get("media", ())))
        return cls(data["text"], tokens, data["label"], data["metadata"], group_index, policy, media)


def _is_valid(row: object) -> bool:
    return isinstance(row, Row) and isinstance(row.prompt, (str, list)) and isinstance(row.metadata, dict)


class PromptQueue:
    """Numbers prompts and tracks each of them until it is used or put back.

    Args:
        source: supplies rows.
        render: see ``RenderRows``; rows with None are skipped.
        kind: name of the source (``--prompts``); ``load_state`` rejects the state of another kind.
        label: names the source in messages.

    Attributes:
        waiting: prompts that were put back; ``next`` returns them first.
        out: prompts in use by group number: neither used up nor put back yet.
        left_out: number of rows that ``render`` skipped.
    """

    def __init__(
        self,
        source: PromptSource,
        render: RenderRows,
        kind: str = "file",
        label: str = "the prompt source",
    ) -> None:
        self.source, self.render, self.kind, self.label = source, render, kind, label
        self.waiting: deque[Prompt] = deque()
        self.out: dict[int, Prompt] = {}
        self.next_group = 0
        self.left_out = 0
        self._left_out_since = 0

    def next(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, starting with those put back. Each gets a new group number."""
        made = [replace(self.waiting.popleft(), group_index=self._number()) for _ in [*self.waiting][:count]]
        while len(made) < count:
            made += self._render_rows(count - len(made))
        self.out |= {p.group_index: p for p in made}
        return made

    def _render_rows(self, count: int) -> list[Prompt]:
        """Render the next ``count`` rows; skipped rows yield no prompt.

        Raises:
            DataError: the source did not return ``count`` rows, or ``GIVE_UP`` consecutive rows were skipped.
        """
        rows = self.source.next(count)
        if not isinstance(rows, list) or len(rows) != count or not all(map(_is_valid, rows)):
            raise DataError(
                f"{self.label}: {type(self.source).__name__}.next({count}) returned {rows!r:.160}; expected a list of {count} "
                "miles_core.data.Row, each with a text or a list of messages as prompt and a dict as metadata"
            )
        made = []
        for row, tokens in zip(rows, self.render(rows), strict=True):
            if tokens is not None:
                made.append(Prompt.of(row, tokens, self._number()))
                self._left_out_since = 0
                continue
            self.left_out += 1
            self._left_out_since += 1
            if self._left_out_since >= GIVE_UP:
                raise DataError(
                    f"the last {GIVE_UP} prompts of the source are all longer than --rollout-max-prompt-len or invalid (see the warnings "
                    "in the log); raise it, or correct the source"
                )
        return made

    def put_back(self, prompts: list[Prompt]) -> None:
        """Return prompts to the front of the queue."""
        self.mark_used(prompts)
        self.waiting.extendleft(reversed(prompts))

    def mark_used(self, prompts: Iterable[Prompt]) -> None:
        """Stop tracking prompts that were trained on or rejected by a filter."""
        for prompt in prompts:
            self.out.pop(prompt.group_index, None)

    def state(self, held: Collection[int] = ()) -> dict[str, Any]:
        """Return the source's position, the numbering and the prompts to generate again, as JSON. Prompts in use come first,
        without the group numbers in ``held``, whose samples the caller stores."""
        out = [prompt for number, prompt in sorted(self.out.items()) if number not in held]
        waiting = [prompt.to_json() for prompt in (*out, *self.waiting)]
        return {"kind": self.kind, "source": self.source.state(), "next_group": self.next_group, "waiting": waiting}

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of ``state``.

        Raises:
            DataError: the state belongs to another kind of source.
        """
        if (kind := state.get("kind", self.kind)) != self.kind:
            raise DataError(
                f"cannot resume: the prompts came from --prompts {kind} when the checkpoint was saved, and come from {self.kind} now; give "
                "the same source, or start a new run from the saved weights"
            )
        self.source.load_state(state["source"])
        self.next_group = state["next_group"]
        self.waiting = deque(Prompt.from_json(prompt) for prompt in state["waiting"])
        self.out = {}

    def _number(self) -> int:
        self.next_group += 1
        return self.next_group - 1
