"""Reads prompts from files in a deterministic order over many epochs, resumable at any row, and converts each to token ids. This happens
once per prompt; nothing is re-tokenised later."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.chat.renderer import Renderer
from miles_core.data.column import Column
from miles_core.data.media import Media, explain_media, is_empty, is_media_key
from miles_core.data.media_reader import MediaReader
from miles_core.data.prompt_file import ChangedFileError, Opener, check_prompt, check_text, open_prompt_file
from miles_core.data.prompt_index import ROWS, sample_rows
from miles_core.data.prompt_source import Chat, PromptSource, Row
from miles_core.errors import ConfigError, DataError
from miles_core.text import load_strict_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: ``expand(text, media=media)``: the text with each placeholder replaced by what the model reads in its place.
Expand = Callable[..., str]


class PromptTemplate:
    """``template(prompt) -> token ids``.

    With the chat template, a text becomes one user message, and the template writes the special tokens; a chat that ends with an assistant
    message is continued there. Without it, the tokenizer adds its default special tokens, except those with which the text already begins and
    those at the end, because the model must continue the prompt.

    Attributes:
        renderer: the chat template, also used by rollout functions; None if the tokenizer has none.
        media: expands the placeholders of media in a rendered prompt; None refuses media.
        known: location of a row -> token ids of its prompt, for rows that were examined before the run.

    Args:
        tokenizer: tokenizer of the trained model.
        apply_chat_template: ``--apply-chat-template``.
        variables: variables for the chat template.

    Raises:
        ConfigError: ``apply_chat_template`` or variables are given but the tokenizer has no chat template, or it ignores a variable.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        apply_chat_template: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.apply_chat_template = tokenizer, apply_chat_template
        if apply_chat_template and not tokenizer.chat_template:
            name = tokenizer.name_or_path or "this model"
            raise ConfigError(
                f"--apply-chat-template: the tokenizer of {name} has no chat template; leave the flag out (prompts are "
                "then taken as they are), or add chat_template.jinja to the checkpoint"
            )
        if variables and not tokenizer.chat_template:
            raise ConfigError(
                f"--chat-template-kwargs: the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; leave the option "
                "out, or add chat_template.jinja to the checkpoint"
            )
        self.renderer = Renderer(tokenizer, variables) if tokenizer.chat_template else None
        self.media: Expand | None = None
        self.known: dict[str, Column] = {}

    def encode_texts(self, prompts: list[Any]) -> list[list[int]] | list[None]:
        """Tokenise all prompts at once, which takes a fraction of the time, for ``__call__``; Nones where this is not possible."""
        if prompts and not self.apply_chat_template and all(isinstance(prompt, str) for prompt in prompts):
            with suppress(Exception):  # the call with the prompt raises it again
                return list(self.tokenizer(prompts, return_attention_mask=False).input_ids)
        return [None] * len(prompts)

    def __call__(
        self, prompt: str | list[dict[str, Any]], encoded: list[int] | None = None, media: Sequence[Media] = ()
    ) -> list[int]:
        """Convert ``prompt`` to token ids; the result is never empty. ``encoded``: what ``encode_texts`` returned for it.

        Raises:
            DataError: chat messages without a chat template, messages that the template rejects, media that cannot be decoded or do not
                fit its placeholders, or an empty result.
        """
        expand = None if self.media is None else partial(self.media, media=media)
        if media and expand is None:
            raise DataError("the prompt has media, but the engine of this run accepts only text")
        if self.apply_chat_template:
            assert self.renderer is not None  # checked
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            self._refuse_rendered(messages)
            return self.renderer.render(messages, expand=expand)
        if not isinstance(prompt, str):
            raise DataError(
                f"the prompt {prompt!r:.80} is a list of chat messages; give --apply-chat-template to render it"
            )
        tokens = self._plain(prompt if expand is None else expand(prompt), encoded if not media else None)
        if not tokens:
            raise DataError(f"the prompt {prompt!r:.80} has no token; remove it from the data")
        return tokens

    def _plain(self, text: str, encoded: list[int] | None) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text) if encoded is None else encoded
        start, end = self._added
        tokens = tokens[: len(tokens) - end]
        return tokens[len(start) :] if start and tokens[len(start) : 2 * len(start)] == start else tokens

    def _refuse_rendered(self, messages: list[dict[str, Any]]) -> None:
        """Raise DataError if a message is text that a chat template rendered: its control tokens would become ordinary text."""
        assert self.renderer is not None
        for message in messages:
            content = message.get("content") if message.get("role") in ("user", "system") else None
            if isinstance(content, str) and (mark := self.renderer.find_rendered(content)):
                raise DataError(
                    f"the prompt {content!r:.80} begins with {mark!r:.40}, which chat templates write: it was rendered before, and would be "
                    "rendered twice; give the messages, or leave out --apply-chat-template if it was rendered for this model"
                )

    @cached_property
    def _added(self) -> tuple[list[int], int]:
        """The tokens that the tokenizer adds before a text, and the number of those that it adds after it."""
        whole, bare = (list(self.tokenizer.encode("a", add_special_tokens=added)) for added in (True, False))
        if not bare:  # a vocabulary without the letter
            end = int(whole[-1:] == [self.tokenizer.eos_token_id])
            return whole[: len(whole) - end], end
        found = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
        return (whole[: found[0]], len(whole) - found[0] - len(bare)) if found else ([], 0)


def parse_variables(items: Iterable[str]) -> dict[str, Any]:
    """Parse the values of ``--chat-template-kwargs``: ``NAME=VALUE``, where VALUE is JSON (also True and False) or else text.

    Raises:
        ConfigError: an item has no name or no value.
    """
    variables: dict[str, Any] = {}
    for item in items:
        name, separator, text = item.partition("=")
        if not separator or not name.strip().isidentifier():
            raise ConfigError(f"--chat-template-kwargs: {item!r} must be NAME=VALUE, such as enable_thinking=false")
        try:
            variables[name.strip()] = json.loads({"True": "true", "False": "false"}.get(text, text))
        except json.JSONDecodeError:
            variables[name.strip()] = text
    return variables


class Prompts(PromptSource):
    """The rows of JSONL and parquet files, epoch after epoch.

    Every row is checked when the files are opened, so that a missing key, a null label or a malformed line is reported immediately
    and not hours later. Of large files, ``sample_rows`` are checked; ``next`` returns an invalid one of the others with its ``fault``.
    With ``shuffle`` the order of epoch e depends only on (seed, e).

    Attributes:
        examined: whether every row was checked.

    Args:
        paths: files, each ``path`` or ``path@[a:b]``.
        input_key, label_key, metadata_key: names of the columns, or ``COLUMN.ENTRY`` (``find_entry``); without ``label_key`` labels are
            None.
        shuffle: use a new random order in each epoch instead of the order of the files.
        seed: seed of the shuffle.
        open_parquet: opens parquet files; they are refused without it.
        media: take images out of the rows (``MediaReader``); without it, rows with media are refused.
        columns: names of the columns that a subclass with other ``check`` and ``convert`` reads instead.

    Raises:
        DataError: a file is missing or malformed, a key is missing, or there are no rows.
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        *,
        input_key: str = "input",
        label_key: str | None = None,
        metadata_key: str = "metadata",
        shuffle: bool = False,
        seed: int = 0,
        open_parquet: Opener | None = None,
        media: bool = False,
        columns: Sequence[str] = (),
    ) -> None:
        self.input_key, self.label_key, self.metadata_key = input_key, label_key, metadata_key
        self.shuffle, self.seed, self.media = shuffle, seed, media
        paths = [paths] if isinstance(paths, str) else list(paths)
        columns = columns or [key for key in (input_key, label_key, metadata_key) if key is not None]
        self._named = columns
        meaning = json.dumps([type(self).__qualname__, *columns, *(["media"] if media else [])])
        self._files = [open_prompt_file(path, columns, self.check, meaning, open_parquet, media) for path in paths]
        self._ends = list(accumulate(len(file) for file in self._files))
        if not self._ends or self._ends[-1] == 0:
            raise DataError(f"{', '.join(paths) or 'the list of prompt files'} has no prompts: the data set is empty")
        self._chosen: Sequence[int] = range(self._ends[-1])
        self.length = len(self._chosen)
        self.examined = self.length < ROWS
        self._epoch, self._offset = 0, 0
        self._order: np.ndarray | None = None
        self._digests: dict[int, bytes] = {}  # row -> digest of its media

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Row:
        """Return row ``index`` in the order of the files."""
        return self.row(self._chosen[index])

    def row(self, at: int) -> Row:
        """Return row ``at`` of the files, whose number does not depend on ``restrict``."""
        file = bisect_right(self._ends, at)
        row, place = self._files[file].read(at - (self._ends[file - 1] if file else 0))
        if not self.examined:
            self.check(row, place)
        return self.convert(row, at, place)

    def convert(self, row: dict[str, Any], at: int, place: str) -> Row:
        """Convert row ``at`` of the files, which ``check`` accepted."""
        prompt: Any = _without_nulls(find_entry(row, self.input_key))
        media: tuple[Media, ...] = ()
        if self.media:
            prompt, media = self._take_media(prompt, row, at, place)
        return Row(
            prompt=prompt,
            media=media,
            label=None if self.label_key is None else find_entry(row, self.label_key),
            metadata=find_entry(row, self.metadata_key, {}) or {},
            index=at,
            place=place,
            examined=self.examined,
        )

    def _take_media(
        self, prompt: str | Chat, row: dict[str, Any], at: int, place: str
    ) -> tuple[Any, tuple[Media, ...]]:
        """Return the prompt with parts for its media, and these; they must be the same whenever the row is read."""
        reader = MediaReader(self._files[bisect_right(self._ends, at)].path.parent)
        prompt = reader.take(prompt, row, [find_column(key, row) for key in self._named], place)
        if reader.found:
            digest = hashlib.sha256("".join(media.digest for media in reader.found).encode()).digest()
            if self._digests.setdefault(at, digest) != digest:
                raise ChangedFileError(
                    f"{place}: an image of the row was changed while the run reads it; put back what it held"
                )
        return prompt, tuple(reader.found)

    def __iter__(self) -> Iterator[Row]:
        """Iterate over all rows once in the order of the files; does not change the position."""
        return (self[index] for index in range(len(self)))

    @property
    def epoch(self) -> int:
        """The epoch of the next row."""
        return self._epoch

    def next(self, n: int) -> list[Row]:
        """Return the next ``n`` rows, which may span several epochs."""
        return [self._read(at) for at in self.take(n)]

    def take(self, n: int) -> list[int]:
        """Return the indexes of the next ``n`` rows, which ``row`` accepts, without reading the rows. Advances as ``next`` does."""
        rows = []
        for _ in range(n):
            if self._order is None:
                self._order = epoch_order(len(self), self.seed, self._epoch) if self.shuffle else np.arange(len(self))
            rows.append(self._chosen[int(self._order[self._offset])])
            self._offset += 1
            if self._offset == len(self):
                self._epoch, self._offset, self._order = self._epoch + 1, 0, None
        return rows

    def _read(self, at: int) -> Row:
        """Return row ``at`` of the files, with its fault if it is invalid and was not examined before the run."""
        try:
            return self.row(at)
        except DataError as error:
            if self.examined or isinstance(error, ChangedFileError):
                raise
            return Row("", index=at, examined=False, fault=str(error))

    def restrict(self, indices: Sequence[int]) -> None:
        """Restrict the data set to the rows with these indices, in this order; call it before the first ``next``."""
        if not indices:
            raise DataError("no prompt is left: the data set would be empty")
        self._chosen = [self._chosen[i] for i in indices]
        self.length = len(self._chosen)
        self._epoch, self._offset, self._order = 0, 0, None

    def state(self) -> dict[str, Any]:
        """Return the position and the identity of the rows, as JSON."""
        return {"epoch": self._epoch, "offset": self._offset, **self._identity()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a position.

        Raises:
            DataError: the rows or their shuffling differ from those of the saved run.
        """
        meaning = {
            "rows": "the number of prompts",
            "digest": "the content of the prompt files",
            "media": "the content of the images",
            "shuffle": "--rollout-shuffle",
            "seed": "--seed, by which prompts are shuffled,",
        }
        for name, value in self._identity().items():
            if (saved := state.get(name)) != value:
                raise DataError(
                    f"cannot resume: {meaning[name]} was {saved} when the checkpoint was saved and is {value} "
                    "now; give the same prompts and options, or start a new run from the saved weights"
                )
        self._epoch, self._offset, self._order = state["epoch"], state["offset"], None

    def _identity(self) -> dict[str, Any]:
        digest = hashlib.sha256("".join(file.digest for file in self._files).encode()).hexdigest()[:16]
        identity = {"rows": len(self), "digest": digest, "shuffle": self.shuffle}
        if self.media:  # of the rows that are read before every run
            read = (self._digests.get(at, b"") for at in sample_rows(self._ends[-1]))
            identity["media"] = hashlib.sha256(b"".join(read)).hexdigest()[:16]
        return identity | ({"seed": self.seed} if self.shuffle else {})

    def check(self, row: dict[str, Any], place: str) -> None:
        """Raise DataError for an invalid row at ``place``."""
        prompt, label, metadata = (
            None if key is None else find_entry(row, key, _ABSENT)
            for key in (self.input_key, self.label_key, self.metadata_key)
        )
        for key, value in ((self.input_key, prompt), (self.label_key, label), (self.metadata_key, metadata)):
            if key is not None and value is not None and value is not _ABSENT:
                check_text(value, key, place)
        if prompt is _ABSENT:
            raise DataError(f"{place}: no key {self.input_key!r} for the prompt; choose --input-key from: {_keys(row)}")
        check_prompt(prompt, self.input_key, place, self.media)
        named = [find_column(key, row) for key in self._named]
        for key, value in row.items():
            if not self.media and key not in named and is_media_key(key) and not is_empty(value):
                raise DataError(explain_media(place, f"the column {key!r} is not empty"))
        if label is _ABSENT:
            raise DataError(f"{place}: no key {self.label_key!r} for the label; choose --label-key from: {_keys(row)}")
        if label is None and self.label_key is not None:
            raise DataError(f"{place}: the label {self.label_key!r} is null; every row needs one")
        if metadata not in (None, _ABSENT) and not isinstance(metadata, dict):
            raise DataError(f"{place}: the metadata {self.metadata_key!r} must be an object, this is {metadata!r:.80}")


_ABSENT: Any = object()


def find_column(key: str, columns: Container[str]) -> str:
    """Return the column that ``key`` names: the key itself, or of ``a.b.c`` the longest of ``a.b`` and ``a`` that is a column."""
    if key in columns or "." not in key:
        return key
    heads = accumulate(key.split("."), "{}.{}".format)
    return next((head for head in reversed([*heads]) if head in columns), key)


def find_entry(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the entry ``key`` of a row, or ``default``. ``a.b`` is the entry ``b`` of the mapping ``a``, which may be the text of a JSON
    object; a key that contains the dot itself has precedence."""
    head = find_column(key, row)
    if head not in row:
        return default
    value, rest = row[head], key[len(head) + 1 :]
    if rest and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = load_strict_json(value)
    return value if not rest else find_entry(value, rest, default) if isinstance(value, Mapping) else default


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of one epoch, int64 [rows], which is the same on every machine and numpy version.

    ``RandomState`` is used because numpy freezes its streams (NEP 19); those of ``Generator`` may change.
    """
    key = hashlib.sha256(f"prompts:{seed}:{epoch}".encode()).digest()
    return np.random.RandomState(np.frombuffer(key, dtype="<u4")).permutation(rows)


def _keys(row: Mapping[str, Any]) -> str:
    entries = [f"{key}.{entry}" for key, value in row.items() if isinstance(value, Mapping) for entry in value]
    return ", ".join(map(repr, [*row, *entries])) or "none"


def _without_nulls(prompt: str | Chat) -> str | Chat:
    """Remove null entries from chat messages: parquet adds all keys to every message, but a chat template must not see absent ones."""
    if isinstance(prompt, str):
        return prompt
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in prompt]
