"""Read YAML and TOML configuration files, with line numbers, and convert them to assignments.

Keys are tables of options (``rollout: {batch_size: 32}``) or flags without their dashes (``rollout-batch-size: 32``). One
file may use both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_core.config import foreign_flags, policies
from miles_core.config.flags import Assignment, Source
from miles_core.config.schema import Schema
from miles_core.config.yaml_scalars import make_loader
from miles_core.errors import ConfigError
from miles_core.nearest import did_you_mean

log = logging.getLogger(__name__)

DEFAULTS = "defaults"  # the table of a saved configuration with the values that the user did not set


@dataclass(frozen=True)
class Entry:
    """One key of a file: its value, its line (0 if unknown), and its entries if the value is a table.

    ``text`` is the original text of a number or boolean, which text options use instead of the value (``model_name: 1.10``).
    """

    key: str
    value: Any
    line: int
    children: tuple[Entry, ...] | None = None
    text: str = ""


def read(path: str) -> list[Entry]:
    """Read the top-level entries of a file.

    Raises:
        ConfigError: the file is missing, is neither YAML nor TOML, is malformed (names the line), or is not a table.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot read it ({getattr(error, 'strerror', None) or error})") from None
    if file.suffix in (".yaml", ".yml", ".json"):
        return read_yaml(text, path)
    if file.suffix == ".toml":
        return _read_toml(text, path)
    raise ConfigError(f"--config {path}: its name must end in .yaml, .yml, .json or .toml")


def read_yaml(text: str, path: str) -> list[Entry]:
    """Parse the top-level entries of a YAML text. ``path`` is its name in messages. Raises ConfigError like ``read``."""
    import yaml

    loader = None
    try:
        loader = make_loader(text)
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: it must be a mapping of keys to values, not a single {_shape(node)}")
        return list(_yaml_entries(loader, node, path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: malformed YAML, {error.problem or error.context}") from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply, or an anchor in it holds itself") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: malformed YAML, {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _shape(node: Any) -> str:
    return "list" if type(node).__name__ == "SequenceNode" else "value"


def _yaml_entries(loader: Any, node: Any, path: str) -> Iterator[Entry]:
    import yaml

    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path} line {line}: a key must be a name")
        key = key_node.value
        if key in lines:
            raise ConfigError(f"{path} line {line}: {key} is defined twice (also in line {lines[key]})")
        lines[key] = line
        is_table = isinstance(value_node, yaml.MappingNode)
        children = tuple(_yaml_entries(loader, value_node, path)) if is_table else None
        value = loader.construct_object(value_node, deep=True)
        text = value_node.value if isinstance(value, int | float) else ""
        yield Entry(key, value, line, children, text)


def _read_toml(text: str, path: str) -> list[Entry]:
    import tomllib

    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None
    except ValueError as error:  # a syntax error, or an integer with thousands of digits
        raise ConfigError(f"{path}: malformed TOML, {error}") from None
    return _toml_entries(content, text, 0)


def _toml_entries(content: dict[str, Any], text: str, start: int) -> list[Entry]:
    """Convert parsed TOML to entries.

    tomllib gives no positions, so the line of a key is the first line after the table's heading that begins with the key.
    """
    entries = []
    for key, value in content.items():
        pattern = rf'^[ \t]*(\[[^\]\n]*)?["\']?{re.escape(key)}["\']?[ \t]*[\]=.]'
        match = re.compile(pattern, re.MULTILINE).search(text, start)
        line = text.count("\n", 0, match.start()) + 1 if match else 0
        children = tuple(_toml_entries(value, text, match.start() if match else start)) if type(value) is dict else None
        entries.append(Entry(key, value, line, children))
    return entries


def assignments(
    entries: list[Entry], schema: Schema, path: str, rank: int, saved: bool = False
) -> tuple[list[Assignment], list[str]]:
    """Convert a file's entries to assignments. Returns the assignments and one error message per unknown key.

    Args:
        saved: whether a run wrote the file, perhaps of an earlier version, which had an option in another table.
    """
    reader = _Reader(schema, path, rank, saved)
    for entry in entries:
        if entry.key == DEFAULTS and entry.children is not None:
            for child in entry.children:
                reader.read_top(child, chosen=False)
        else:
            reader.read_top(entry, chosen=True)
    return reader.assignments, reader.problems


class _Reader:
    """Collects assignments and problems while it reads the entries of one file."""

    def __init__(self, schema: Schema, path: str, rank: int, saved: bool) -> None:
        self.schema = schema
        self.path = path
        self.rank = rank
        self.saved = saved
        self.assignments: list[Assignment] = []
        self.problems: list[str] = []

    def where(self, entry: Entry) -> str:
        return f"{self.path} line {entry.line}" if entry.line else self.path

    def add(self, path: str, entry: Entry, chosen: bool, value: Any = None, passthrough: bool = False) -> None:
        where = self.where(entry) if chosen else f"default, saved in {self.where(entry)}"
        option = self.schema.options.get(path)
        written = entry.text if option is not None and option.inner in (str, Path) else ""
        raw = (written or entry.value) if value is None else value
        assignment = Assignment(path, raw, where, Source.FILE, where, self.rank, chosen, passthrough)
        if chosen:
            self.assignments.append(assignment)
        else:  # saved defaults have lower precedence than values set in the same file
            self.assignments.append(replace(assignment, rank=-1))

    def table(self, key: str) -> str:
        """Return the table that a key names: ``-`` and ``_`` are equal in it, and may be left out (``my_plugin`` is ``myplugin``)."""
        name = key.replace("-", "_")
        joined = {group.replace("_", ""): group for group in self.schema.groups}
        return name if name in self.schema.groups else joined.get(name.replace("_", ""), name)

    def read_top(self, entry: Entry, chosen: bool) -> None:
        """Read a top-level entry. ``chosen`` is False for saved defaults."""
        name = self.table(entry.key)
        if name == policies.TABLE:
            self.read_policies(entry, chosen)
        elif entry.children is not None and (name in self.schema.groups or name in self.schema.passthrough.values()):
            for child in entry.children:
                self.read_in_table(name, child, chosen)
        elif not self.read_flag(entry, chosen):
            option = self.schema.find(entry.key)
            if option is None and entry.value is None and name in self.schema.groups:
                return  # a table whose entries are all commented out
            if option is None:
                self.problems.append(self.explain_unknown(entry))
            else:
                self.add(option.path, entry, chosen)

    def read_policies(self, entry: Entry, chosen: bool) -> None:
        """Read the table ``policies``: policy name -> options of that policy."""
        if not entry.children or any(child.children is None and child.value is not None for child in entry.children):
            self.problems.append(
                f"{self.where(entry)}: policies is a table of tables: a policy's name, and under it its options"
            )
            return
        for policy in entry.children:
            own = _Reader(self.schema, self.path, self.rank, self.saved)
            own.add("", policy, chosen)
            for option in policy.children or ():
                if option.key in (policies.ROLE, policies.GENERATES):
                    own.add(option.key, option, chosen)
                else:
                    own.read_top(option, chosen)
            assignments = policies.add_prefix(policy.key, own.assignments)
            self.assignments += [replace(a, path=a.path.rstrip(".")) for a in assignments]
            self.problems += [f"{problem} (of the policy {policy.key})" for problem in own.problems]

    def read_in_table(self, table: str, entry: Entry, chosen: bool) -> None:
        """Read a key of ``table``: an option of the table, a flag of the table, or a pass-through key."""
        path = f"{table}.{entry.key.replace('-', '_')}"
        if path in self.schema.options:
            for option in self.schema.flag_of(path).options:
                self.add(option.path, entry, chosen)
        elif self._is_flag_of(table, entry):
            self.read_flag(entry, chosen)
        elif table in self.schema.passthrough.values():
            self.add(path, entry, chosen, passthrough=True)
        elif (self.saved or not chosen) and _flag(entry.key) in self.schema.flags:
            self.read_flag(entry, chosen)  # saved before the option moved to another table
        elif not chosen:
            log.warning("%s: the default of %s is ignored: there is no such option any more", self.where(entry), path)
        else:
            fields = [option.name for option in self.schema.options.values() if option.group == table]
            hint = did_you_mean(entry.key.replace("-", "_"), fields, "; ") or self._name_in_other_tables(entry.key)
            self.problems.append(f"{self.where(entry)}: the table {table} has no key {entry.key!r}{hint}")

    def _is_flag_of(self, table: str, entry: Entry) -> bool:
        flag = self.schema.flags.get(_flag(entry.key))
        return flag is not None and any(option.group == table for option in flag.options)

    def _name_in_other_tables(self, key: str) -> str:
        names = [option.path for option in self.schema.options.values() if option.name == key.replace("-", "_")]
        return f"; there is {' and '.join(names)}" if names else ""

    def read_flag(self, entry: Entry, chosen: bool) -> bool:
        """Read an entry whose key is a flag, an alias or a pass-through flag; returns whether it is one."""
        spelling = _flag(entry.key)
        if spelling in self.schema.flags:
            for option in self.schema.flags[spelling].options:
                self.add(option.path, entry, chosen)
        elif spelling in self.schema.aliases:
            if entry.value not in (True, False):
                self.problems.append(f"{self.where(entry)}: {entry.key} sets fixed values; write true")
            elif entry.value:
                for path, value in self.schema.aliases[spelling].values.items():
                    target = self.schema.find(path)
                    self.add(target.path if target else path, entry, chosen, value)
        elif table_and_key := self.schema.passthrough_of(spelling):
            self.add(".".join(table_and_key), entry, chosen, passthrough=True)
        else:
            return False
        return True

    def explain_unknown(self, entry: Entry) -> str:
        """Return an error message for an unknown top-level key."""
        if entry.children is not None:
            hint = did_you_mean(entry.key, self.schema.groups, "; ") or f"; tables are {', '.join(self.schema.groups)}"
            return f"{self.where(entry)}: unknown table {entry.key!r}{hint} (a plugin's exists once it is installed)"
        explained = foreign_flags.explain_flag(_flag(entry.key), self.schema).replace("unknown flag", "unknown key")
        return f"{self.where(entry)}: {explained.replace(_flag(entry.key), entry.key, 1)}"


def _flag(key: str) -> str:
    return "--" + key.lstrip("-").replace("_", "-")
