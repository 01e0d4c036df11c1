"""The schema: all options of core's groups and of the plugins' manifests.

The command line, configuration files, value checks, ``--help``, the reference page and the facts are all derived from it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from miles_core.config.groups import GROUPS
from miles_core.errors import PluginError
from miles_core.nearest import did_you_mean
from miles_core.plugin.core import CORE as MANIFEST
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.options import METADATA_KEY, OptionInfo

CORE = "core"
ROOT = "run"  # the group whose facts have no prefix: ``engine``, not ``run.engine``


@dataclass(frozen=True)
class Option:
    """One option of one owner.

    Attributes:
        path: ``<group>.<field>``, the name in files and rules.
        owner: a plugin's name, or ``"core"`` for options of core and of standard plugins.
        flag: the flag, with dashes.
        type: the annotation, e.g. ``int | None``.
        default: the default value.
        info: the declaration (``miles_core.plugin.option``).
        choices: allowed values, including those that plugins add; empty allows every value of the type.
        providers: choice -> names of the plugins that provide it.
    """

    path: str
    owner: str
    flag: str
    type: Any
    default: Any
    info: OptionInfo
    choices: tuple[Any, ...] = ()
    providers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def group(self) -> str:
        return self.path.partition(".")[0]

    @cached_property
    def name(self) -> str:
        return self.path.partition(".")[2]

    @property
    def fact(self) -> str:
        return self.info.fact or (self.name if self.group == ROOT else self.path)

    def enables_with(self, value: Any) -> bool:
        """Whether this value of the option enables its plugin: any except None, False, and a default of 0 or of no items."""
        off = value is None or value is False or (not value and value == self.default)
        return self.info.enables and not off

    @cached_property
    def inner(self) -> Any:
        """The type without ``| None``."""
        arguments = typing.get_args(self.type)
        if typing.get_origin(self.type) in (typing.Union, types.UnionType) and type(None) in arguments:
            rest = [argument for argument in arguments if argument is not type(None)]
            return rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]  # noqa: UP007
        return self.type

    @property
    def optional(self) -> bool:
        return self.inner is not self.type

    @property
    def is_bool(self) -> bool:
        return self.inner is bool

    @property
    def is_path(self) -> bool:
        """Whether the value is the path of a file or directory (``~`` expands to the home directory, also in files)."""
        return self.inner is Path or self.info.metavar.startswith(("DIR", "FILE"))

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.inner) in (list, tuple)


@dataclass(frozen=True)
class Flag:
    """One flag and the options it sets (several if packages share the flag)."""

    spelling: str
    aliases: tuple[str, ...]
    options: tuple[Option, ...]

    @property
    def option(self) -> Option:
        """The first owner's option; type, default, choices and help are the same for all owners."""
        return self.options[0]

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(option.owner for option in self.options)


@dataclass(frozen=True)
class Alias:
    """A flag that sets fixed values, e.g. ``--rollout-mine`` sets ``rollout.precision = mine``."""

    spelling: str
    owner: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Schema:
    """All options of core and of a set of manifests.

    Attributes:
        groups: table -> dataclass, core's first.
        owners: table -> the plugin's name, or ``"core"`` for tables of core and of standard plugins.
        options: path -> option.
        flags: spelling and every alias spelling -> flag.
        aliases: spelling -> alias with fixed values.
        environment: environment variable -> option path.
        passthrough: flag prefix -> table that accepts any key.
        manifests: plugin name -> manifest.
    """

    groups: Mapping[str, type]
    owners: Mapping[str, str]
    options: Mapping[str, Option]
    flags: Mapping[str, Flag]
    aliases: Mapping[str, Alias]
    environment: Mapping[str, str]
    passthrough: Mapping[str, str]
    manifests: Mapping[str, Plugin]

    def find(self, path: str) -> Option | None:
        """Return the option with this path (``rollout.batch_size``) or fact name (``engine``), or None."""
        return self.options.get(path) or self._by_fact.get(path)

    @cached_property
    def _by_fact(self) -> dict[str, Option]:
        return {option.fact: option for option in self.options.values()}

    def flag_of(self, path: str) -> Flag:
        return self.flags[self.options[path].flag]

    def distinct_flags(self) -> list[Flag]:
        """Return every flag once, in the order of the groups."""
        return list({flag.spelling: flag for flag in self.flags.values()}.values())

    def passthrough_of(self, flag: str) -> tuple[str, str] | None:
        """Return (table, key) if a plugin accepts all flags with a prefix of ``flag``, else None. The longest prefix wins."""
        for prefix in sorted(self.passthrough, key=len, reverse=True):
            if flag.startswith(prefix) and len(flag) > len(prefix):
                return self.passthrough[prefix], flag[len(prefix) :].replace("-", "_")
        return None

    def spellings(self) -> list[str]:
        """Return all flags and aliases, including the ``--no-`` forms of switches."""
        negative = [f"--no-{name[2:]}" for name, flag in self.flags.items() if flag.option.is_bool]
        return [*self.flags, *self.aliases, *negative]


def collect(manifests: Iterable[Plugin] | Mapping[str, Plugin]) -> Schema:
    """Build the schema of core and these plugins. A mapping (plugin name -> manifest) becomes ``Schema.manifests``.

    Raises:
        PluginError: two packages declare the same flag differently, or a manifest refers to an unknown option.
    """
    every = manifests.values() if isinstance(manifests, Mapping) else manifests
    plugins = [plugin for plugin in every if plugin.name != CORE]  # core's options are GROUPS
    names = manifests if isinstance(manifests, Mapping) else {plugin.name: plugin for plugin in plugins}
    tables = {**GROUPS, **{plugin.name: plugin.config for plugin in plugins if plugin.config is not None}}
    # the options of standard plugins are part of every run, like core's
    owners = dict.fromkeys(GROUPS, CORE) | {p.name: CORE if p.standard else p.name for p in plugins}
    for plugin in plugins:
        if plugin.name in GROUPS:
            raise PluginError(f"a plugin may not be called {plugin.name!r}: that is one of core's configuration tables")
        owners.update(dict.fromkeys(plugin.passthrough.values(), plugin.name))
    options = [
        option for table, group in tables.items() for option in _options_of(table, group, owners[table], plugins)
    ]
    options = _apply_defaults(options, plugins)
    flags = _merge_flags(options)
    merged = {option.path: option for flag in flags.values() for option in flag.options}
    schema = Schema(
        groups=tables,
        owners=owners,
        options={option.path: merged[option.path] for option in options},
        flags=flags,
        aliases=_aliases([MANIFEST, *plugins], flags),
        environment=_merge_unique(plugins, "environment"),
        passthrough=_merge_unique(plugins, "passthrough"),
        manifests=names,
    )
    _check_references(schema)
    return schema


def _options_of(table: str, group: type, owner: str, plugins: list[Plugin]) -> list[Option]:
    if not dataclasses.is_dataclass(group):
        raise PluginError(f"plugin {owner}: its config is {group!r}; expected a dataclass")
    hints = _hints(group)
    options = []
    for entry in dataclasses.fields(group):
        info = entry.metadata.get(METADATA_KEY)
        if not isinstance(info, OptionInfo):
            raise PluginError(
                f"plugin {owner}: {group.__name__}.{entry.name} is not made with miles_core.plugin.options(...)"
            )
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        elif entry.default is not dataclasses.MISSING:
            default = entry.default
        else:
            raise PluginError(f"plugin {owner}: the option {table}.{entry.name} has no default value")
        flag = info.flag or "--" + entry.name.replace("_", "-")
        choices, providers = _choices(info, hints[entry.name], plugins)
        options.append(
            Option(f"{table}.{entry.name}", owner, flag, hints[entry.name], default, info, choices, providers)
        )
    return options


@cache
def _hints(group: type) -> dict[str, Any]:
    """Return the types of an options class. Cached, because resolving them dominates the time to collect a schema."""
    return typing.get_type_hints(group)


def _apply_defaults(options: list[Option], plugins: list[Plugin]) -> list[Option]:
    """Apply the defaults of manifests; raises PluginError if two manifests give different defaults for an option."""
    given: dict[str, tuple[Any, str]] = {}
    for plugin in plugins:
        for fact, default in plugin.defaults.items():
            other = given.setdefault(fact, (default, plugin.name))
            if other[0] != default:
                raise PluginError(
                    f"{other[1]} and {plugin.name} give different defaults for {fact}: {other[0]!r} and {default!r}; "
                    "uninstall one of them"
                )
    return [dataclasses.replace(o, default=given[o.fact][0]) if o.fact in given else o for o in options]


def _choices(
    info: OptionInfo, annotation: Any, plugins: list[Plugin]
) -> tuple[tuple[Any, ...], dict[str, tuple[str, ...]]]:
    """Return the declared choices (or those of ``Literal``), with ``"*"`` replaced by the names that core and plugins provide, and
    choice -> plugins that provide it."""
    choices = info.choices or tuple(
        value
        for candidate in (annotation, *typing.get_args(annotation))
        if typing.get_origin(candidate) is typing.Literal
        for value in typing.get_args(candidate)
    )
    providers: dict[str, tuple[str, ...]] = {}
    if "*" in choices:
        choices = tuple(dict.fromkeys([*(c for c in choices if c != "*"), *MANIFEST.provides.get(info.part, {})]))
        for plugin in plugins:
            for name in plugin.formats if info.part == "format" else plugin.provides.get(info.part, {}):
                providers[name] = (*providers.get(name, ()), plugin.name)
    return tuple(dict.fromkeys((*choices, *providers))), providers


def _merge_flags(options: list[Option]) -> dict[str, Flag]:
    by_flag: dict[str, list[Option]] = {}
    for option in options:
        by_flag.setdefault(option.flag, []).append(option)
    flags: dict[str, Flag] = {}
    for spelling, shared in by_flag.items():
        first = shared[0]
        for other in shared[1:]:
            for what in ("type", "default"):
                _require_equal(spelling, what, first, other, getattr(first, what), getattr(other, what))
            _require_equal(spelling, "help", first, other, first.info.help, other.info.help)
        aliases = tuple(dict.fromkeys(alias for option in shared for alias in option.info.aliases))
        flag = Flag(spelling, aliases, _merge_choices(shared))
        for name in (spelling, *aliases):
            if name in flags or (name != spelling and name in by_flag):
                other = flags[name].option if name in flags else by_flag[name][0]
                raise PluginError(
                    f"{name} is declared by {first.owner} ({first.path}) and {other.owner} ({other.path})"
                )
            flags[name] = flag
    return flags


def _merge_choices(shared: list[Option]) -> tuple[Option, ...]:
    """Give the options of a shared flag the union of their choices; if one option accepts any value, all do."""
    choices: tuple[Any, ...] = ()
    if all(option.choices for option in shared):
        choices = tuple(dict.fromkeys(choice for option in shared for choice in option.choices))
    return tuple(o if o.choices == choices else dataclasses.replace(o, choices=choices) for o in shared)


def _require_equal(flag: str, what: str, first: Option, other: Option, left: Any, right: Any) -> None:
    if left != right or first.owner == other.owner:
        raise PluginError(
            f"{flag} is declared by {first.owner} ({first.path}) and by {other.owner} ({other.path}) with different "
            f"{what}: {left!r} and {right!r}; one flag may have several owners only when type, default and help agree"
        )


def _aliases(plugins: list[Plugin], flags: Mapping[str, Flag]) -> dict[str, Alias]:
    aliases: dict[str, Alias] = {}
    for plugin in plugins:
        for spelling, values in plugin.aliases.items():
            other = aliases[spelling].owner if spelling in aliases else None
            if spelling in flags:
                other = flags[spelling].option.owner
            if other:
                raise PluginError(f"{spelling} is declared by both {plugin.name} and {other}")
            aliases[spelling] = Alias(spelling, plugin.name, values)
    return aliases


def _merge_unique(plugins: list[Plugin], what: str) -> dict[str, str]:
    """Merge the plugins' ``environment`` or ``passthrough``; raises PluginError if two plugins declare a key."""
    owners: dict[str, Plugin] = {}
    for plugin in plugins:
        for key in getattr(plugin, what):
            if key in owners:
                raise PluginError(f"{key} is declared in the {what} of both {owners[key].name} and {plugin.name}")
            owners[key] = plugin
    return {key: getattr(plugin, what)[key] for key, plugin in owners.items()}


def _check_references(schema: Schema) -> None:
    for alias in schema.aliases.values():
        for path in alias.values:
            if schema.find(path) is None:
                raise PluginError(
                    f"{alias.owner}: its alias {alias.spelling} sets {path}, which is not an option"
                    + did_you_mean(path, schema.options, "; ")
                )
    for plugin in schema.manifests.values():
        for variable, path in plugin.environment.items():
            if schema.find(path) is None:
                raise PluginError(
                    f"{plugin.name}: its environment variable {variable} sets {path}, which is not an option"
                    + did_you_mean(path, schema.options, "; ")
                )
