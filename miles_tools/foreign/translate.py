"""Translates a command line of another program, or one with typing errors, into one of this program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from miles_core.config.foreign_flags import ELSEWHERE, explain_flag
from miles_core.nearest import find_nearest
from miles_tools.foreign import programs, recognize
from miles_tools.foreign.derive import derive
from miles_tools.foreign.not_installed import find_plugins
from miles_tools.foreign.translation import Translation
from miles_tools.foreign.words import Group, read_groups

if TYPE_CHECKING:
    from miles_core.config.schema import Flag, Schema

Table = Mapping[str, str]
#: The pattern that matches any number of words.
ANYTHING = "**"
#: A sentence that is a translation: a flag, a placeholder, and a comment.
_FLAG = re.compile(r"(--[a-z0-9-]+)(?: (?:[A-Z]+(?:=[A-Z]+)?(?:,\.\.\.)?|FILE\.py(?::FN)?))?(?=$|[,;]|:(?!FN))")
#: What is started: a file or a module.
_MODULE = re.compile(r"[\w./$-]+\.(py|toml|yaml|yml|sh)|\w+(\.\w+)+")
_PLACE = re.compile(r"\{(list|\d*)\}")
_ON, _OFF, _UNSET = ("true", "1", "yes", "on"), ("false", "0", "no", "off"), ("null", "none", "")
#: Flags of the command itself, which no option declares.
COMMAND = ("--help", "--help-all", "--dry-run", "--config", "--json", "--hardware", "--fact", "--search")
#: Similarity from which on a flag is corrected and not only suggested.
_TYPING_ERROR = 0.8
#: The same for each of its words, and the similarity from which on words may be joined or divided.
_SIMILAR_WORD, _SAME = 0.65, 0.92
#: Minimum number of options of another program for treating a command line as that program's and completing it.
_WHOLE = 3
#: Words that start other programs.
_LAUNCH = frozenset(
    {"python", "python3", "-m", "-u", "torchrun", "accelerate", "launch", "trl", "grpo", "rloo", "uv", "run", "rl", "@"}
    | {"ray", "job", "submit", "bash", "-x", "-c", "deepspeed", "miles", "train"}
)
#: Flags whose value may be a credential; it is not repeated.
_SECRET = ("key", "token", "password")
#: An environment variable before a command.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=.*", re.DOTALL)


def translate(argv: Sequence[str], schema: Schema, own: Sequence[str] = ()) -> Translation:
    """Translate options that this program does not have, and correct misspelled ones. own: the command's own flags."""
    known = set(schema.spellings()) | set(COMMAND)
    groups = read_groups(argv)
    foreign = [group.name for group in groups if group.name not in known]
    found = Translation(program=recognize(foreign))
    tables = plugin_tables(schema)
    values: dict[str, str] = {}
    result: list[list[str]] = []
    for group in groups:
        result.append(_translate_group(group, schema, known, tables, found, values, own))
    words = [word for part in result for word in part]
    found.is_whole = found.program is not None and len(values) >= _WHOLE
    if found.is_whole:
        words = derive(found, values, words)
    found.line = _without_duplicates(words, schema)
    found.changed = [(typed, _as_in(found.line, here)) for typed, here in found.changed]
    return found


def _as_in(line: Sequence[str], here: str) -> str:
    """Return a flag with its value in the complete line, which may have been converted."""
    flag, _, value = here.partition(" ")
    if not value or " " in value or flag not in line:
        return here
    return f"{flag} {line[line.index(flag) + 1]}"


def plugin_tables(schema: Schema) -> dict[str, Table]:
    """Return flag -> its table, for all installed plugins (``Plugin.foreign_flags``)."""
    return {
        flag: table
        for plugin in schema.manifests.values()
        for flag, table in plugin.foreign_flags.items()
        if not isinstance(table, str)
    }


def _translate_group(
    group: Group,
    schema: Schema,
    known: set[str],
    tables: Mapping[str, Table],
    found: Translation,
    values: dict[str, str],
    own_flags: Sequence[str],
) -> list[str]:
    """Return the words that replace one option and its values, and record the change."""
    name, words = group.name, list(group.words)
    if not name:
        _note_words(words, found)
        return []
    own = _own_table(name, tables) or {}
    replacement = translate_value(own, words)
    if replacement is None and name in known:
        kept, extra = (
            _fit(schema.flags.get(name), name, words) if name not in schema.aliases else _fit_alias(name, words)
        )
        _note_words(extra, found)
        if not kept:
            found.drop(name, "it has no value, or is switched off")
        return kept
    if replacement is not None:
        _record(group, replacement, "it has no effect here", found)
        return replacement
    if find_plugins(name, schema):  # it stays in the line, which is complete once the plugin is installed
        return [name, *words]
    own_path = name.startswith("-") and _find_path(name, schema) and not any(p.names_exactly(name) for p in programs())
    if not own_path and (made := _translate_foreign(group, schema, found, values)) is not None:
        return made
    if (elsewhere := explain_flag(name, schema).partition(ELSEWHERE)[2]) and name not in own_flags:
        found.drop(name, elsewhere)
        return []
    nearest = _find_spelling(name, schema, known | {*own_flags})
    if not nearest:
        _note_words([name, *words], found)
        return []
    if nearest[0] in own_flags:
        found.own += [nearest[0], *words]
        _record(group, [nearest[0], *words], "", found)
        return []
    kept, extra = _fit(schema.flags.get(nearest[0]), nearest[0], words)
    _record(group, kept, "", found)
    _note_words(extra, found)
    return kept


def _find_spelling(name: str, schema: Schema, known: set[str]) -> list[str]:
    """Return the flag meant by a misspelled flag or a path such as ``train.lr``; empty if none is similar."""
    spelling = "--" + name.lstrip("-").replace("_", "-")
    if spelling in known:
        return [spelling]
    if flag := _find_path(name, schema):
        return [flag]
    nearest = find_nearest(name, known)[:1] if name.startswith("-") and "." not in name else []
    return [n for n in nearest if _is_typing_error(name, n)]


def _find_path(name: str, schema: Schema) -> str:
    """Return the flag of an option of this program that is typed by its path, such as ``--train.lr``; "" if there is none."""
    option = schema.find(name.lstrip("-").replace("-", "_")) if "." in name else None
    return option.flag if option is not None else ""


def _is_typing_error(name: str, meant: str) -> bool:
    """Whether two flags differ by a few letters, and not by a word: ``--log-interval`` is not ``--eval-interval``."""
    ratio = SequenceMatcher(None, name, meant).ratio()
    pairs = list(zip(name.strip("-").split("-"), meant.strip("-").split("-"), strict=False))
    same_words = name.count("-") == meant.count("-") and all(
        SequenceMatcher(None, a, b).ratio() >= _SIMILAR_WORD for a, b in pairs
    )
    return ratio >= _TYPING_ERROR and (same_words or ratio > _SAME)


def _own_table(name: str, tables: Mapping[str, Table]) -> Table | None:
    """Return the table of a flag that plugins or slime, whose flags have the same names, give another value."""
    if name in tables:
        return tables[name]
    return next((p.values[name] for p in programs() if name.startswith("--") and name in p.values), None)


def _translate_foreign(group: Group, schema: Schema, found: Translation, values: dict[str, str]) -> list[str] | None:
    """Translate an option of another program; None if none has it."""
    ordered = [*filter(None, [found.program]), *(p for p in programs() if p is not found.program)]
    for program in ordered:
        key = program.find(group.name)
        if key is None:
            continue
        words = [",".join(group.words)] if group.joined else list(group.words)
        values[key if "*" not in key else group.plain] = " ".join(words)
        sentence = program.names[key]
        lowered = [word.lower() for word in words]
        if lowered and lowered[0] in _UNSET:
            found.drop(group.plain, "it is not set")
            return []
        replacement = translate_value(program.table(key), words)
        if replacement is None:
            replacement, extra = _translate_sentence(sentence, words, schema, "*" in key)
            _note_words(extra, found)
        reason = "its value needs no option here" if _FLAG.fullmatch(sentence) else sentence
        _record(group, replacement or [], reason, found)
        return replacement or []
    return None


def _translate_sentence(
    sentence: str, words: Sequence[str], schema: Schema, several: bool
) -> tuple[list[str] | None, Sequence[str]]:
    """Return the flag at the start of a sentence with its values, and the words that are not its values.

    The first is None if the sentence does not start with a flag, or if the foreign option is switched off. several: the sentence
    describes several foreign options, so a flag that takes a value would be ambiguous."""
    match = _FLAG.match(sentence)
    name = match[1] if match else ""
    flag = schema.flags.get(name) or schema.flags.get(f"--{name.removeprefix('--no-')}")
    if match is None or (several and not (flag and flag.option.is_bool)):
        return None, ()
    if flag is not None and flag.option.is_bool:
        return [name] if not words or words[0].lower() in _ON else None, ()
    if flag is None or flag.option.is_list:
        return [name, ",".join(words)] if words else None, ()
    return [name, words[0]] if words else None, words[1:]


def translate_value(table: Table, words: Sequence[str]) -> list[str] | None:
    """Return the replacement for an option with the value ``words``; None if no pattern of the table matches.

    A table maps patterns of the value to the replacement of flag and value. In a replacement, ``{}`` is the value, ``{0}`` and ``{1}`` are
    its words, and ``{list}`` joins them with commas. An empty pattern matches a switch without a value, ``**`` any number of words, and
    an empty replacement drops the option.
    """
    whole = " ".join(words)
    values = {"": whole, "list": ",".join(words), **{str(i): word for i, word in enumerate(words)}}
    for pattern, replacement in table.items():
        fits = len(pattern.split()) == len(words) and any(fnmatchcase(text, pattern) for text in (whole, whole.lower()))
        if fits or pattern == ANYTHING:
            return [_PLACE.sub(lambda place: values[place[1]], word) for word in replacement.split()]
    return None


def _fit(flag: Flag | None, name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return an option of this program with its values as it takes them, and the words that are none of its values."""
    if flag is None:
        return [name, *words], []
    if flag.option.is_bool:
        if words and words[0].lower() in _OFF:
            return [f"--no-{name.removeprefix('--no-').removeprefix('--')}"], list(words[1:])
        on = bool(words) and words[0].lower() in _ON
        return [name], list(words[1:] if on else words)
    if flag.option.is_list and words:
        return [name, ",".join(word.strip(",") for word in words)], []
    return [name, *words[:1]] if words else [], list(words[1:])


def _fit_alias(name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """As ``_fit``, for a flag that sets fixed values, which other programs switch with true and false."""
    if words and words[0].lower() in _OFF:
        return [], list(words[1:])
    return [name], list(words[1:] if words and words[0].lower() in _ON else words)


def _note_words(words: Sequence[str], found: Translation) -> None:
    """Record words that belong to no option, except those that start another program."""
    found.unknown += [
        word for word in words if word not in _LAUNCH and not (_MODULE.fullmatch(word) or _VARIABLE.match(word))
    ]


def _record(group: Group, replacement: Sequence[str], reason: str, found: Translation) -> None:
    if replacement:
        secret = any(part in group.plain.lower().split("-") for part in _SECRET)
        found.changed.append((group.name if secret else group.text, " ".join(replacement)))
    else:
        found.drop(group.plain, reason)


def _without_duplicates(words: Sequence[str], schema: Schema) -> list[str]:
    """Return a command line with each option once: its last value, at its first position."""
    parts: dict[str, list[str]] = {}
    for number, group in enumerate(read_groups(words)):
        flag = schema.flags.get(group.name) or schema.flags.get(f"--{group.name.removeprefix('--no-')}")
        place = f"{group.name} {number}" if flag is None or flag.option.is_list else flag.spelling
        parts[place] = [group.name, *group.words]
    return [word for part in parts.values() for word in part if word]
