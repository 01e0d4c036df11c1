"""The configuration of a run: every option's value, and where it came from."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from miles_core.config import groups, policies, value
from miles_core.config.file import DEFAULTS
from miles_core.config.rollout_group import Rollout
from miles_core.config.schema import CORE, ROOT, Option, Schema
from miles_core.errors import ConfigError, PluginError
from miles_core.nearest import did_you_mean
from miles_core.plugin.facts import Fact


class Config:
    """Checked values of all options; immutable.

    ``config.rollout.temperature`` reads a core group, ``config.plugin("mine").threshold`` a plugin's. Two configurations
    are equal when the plugins asked for and all their values are, wherever these came from.

    Attributes:
        requested: the plugins asked for, in order, each with what asked for it (``"--plugins mine,yours"``).
        plugins: names of the enabled plugins: those asked for and, after ``activated``, what they require.
        policies: the policies that a file names, each with its own values (``miles_core.config.policies``); empty without.
    """

    run: groups.Run
    model: groups.Model
    data: groups.Data
    rollout: Rollout
    reward: groups.Reward
    algorithm: groups.Algorithm
    train: groups.Train
    sft: groups.Sft
    evaluation: groups.Evaluation
    precision: groups.Precision

    def __init__(
        self,
        schema: Schema,
        values: Mapping[str, Any],
        origins: Mapping[str, str],
        chosen: frozenset[str],
        requested: Mapping[str, str],
        passthrough: Mapping[str, Any],
        active: tuple[str, ...] | None = None,
        policies: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """
        Args:
            values: option path -> checked value; a missing one has its default.
            origins: option or pass-through path -> where the value came from.
            chosen: paths whose value a user chose.
            requested: plugin -> what asked for it.
            passthrough: ``table.key`` -> value, for tables that take any key.
            active: the plan's plugins, once there is one.
            policies: name -> its own values: option path, ``role`` or ``generates`` -> checked value.
        """
        self._schema = schema
        self._values = {path: values.get(path, option.default) for path, option in schema.options.items()}
        self._origins = dict(origins)
        self._chosen = chosen
        self._passthrough = dict(passthrough)
        self.requested = dict(requested)
        self.plugins = tuple(requested) if active is None else active
        self._active = active
        self.policies: dict[str, dict[str, Any]] = {name: dict(own) for name, own in (policies or {}).items()}
        self._groups: dict[str, Any] = {}
        for table, group in schema.groups.items():
            fields = {o.name: self._values[o.path] for o in schema.options.values() if o.group == table}
            self._groups[table] = group(**fields)
            if hasattr(type(self), table):
                raise PluginError(
                    f"a plugin may not be called {table!r}: configurations have an attribute of that name"
                )

    @property
    def schema(self) -> Schema:
        return self._schema

    def group(self, table: str) -> Any:
        """The dataclass instance of a table, core's or a plugin's."""
        if table not in self._groups:
            raise KeyError(f"no option group {table!r}{did_you_mean(table, self._groups, '; ')}")
        return self._groups[table]

    def __getattr__(self, name: str) -> Any:
        """``config.mine``: a plugin's table, like core's ``config.rollout``."""
        tables = self.__dict__.get("_groups", {})
        if name not in tables:
            raise AttributeError(f"the configuration has no table {name!r}{did_you_mean(name, tables, '; ')}")
        return tables[name]

    def plugin(self, name: str) -> Any:
        """The config dataclass of a plugin, with defaults where nobody set anything."""
        return self.group(name)

    def passthrough(self, table: str) -> dict[str, Any]:
        """What was given for software with a command line of its own: key -> value, unchecked."""
        start = table + "."
        return {path[len(start) :]: item for path, item in self._passthrough.items() if path.startswith(start)}

    def get(self, path: str) -> Any:
        """The value at ``rollout.temperature`` (``engine`` and its like without prefix) or of a pass-through key."""
        return self._passthrough[path] if path in self._passthrough else self._values[self._find(path).path]

    def origin(self, path: str) -> str:
        """Where the value came from: ``"default"``, ``"--lr 1e-6"``, ``"run.yaml line 4"``, ``"set by mine"``."""
        if path in self._passthrough:
            return self._origins[path]
        return self._origins.get(self._find(path).path, "default")

    def chosen(self, path: str) -> bool:
        """Whether a user (flag, file or environment variable) chose this value."""
        return path in self._chosen or (path not in self._passthrough and self._find(path).path in self._chosen)

    def _find(self, path: str) -> Option:
        option = self._schema.find(path)
        if option is None:
            raise ConfigError(f"there is no option {path}{did_you_mean(path, self._schema.options, '; ')}")
        return option

    @property
    def args(self) -> Namespace:
        """A fresh flat namespace for custom functions: ``args.rollout_temperature``, plugins' options included."""
        return Namespace(**self._named)

    @cached_property
    def _named(self) -> dict[str, Any]:
        shown = {CORE, *self.plugins}
        return {
            option.flag[2:].replace("-", "_"): self._values[option.path]
            for option in self._schema.options.values()
            if option.owner in shown
        }

    def facts(self) -> list[Fact]:
        """Every option as a fact (those of the run group without prefix), and each pass-through value."""
        found = []
        for path, option in self._schema.options.items():
            origin, chosen = self.origin(path), path in self._chosen
            item = plain(self._values[path])
            choices = (False, True) if option.is_bool else option.choices
            fixed = option.info.fixed
            found.append(Fact(option.fact, item, origin, flag=option.flag, choices=choices, chosen=chosen, fixed=fixed))
        flags = {table: prefix for prefix, table in self._schema.passthrough.items()}
        for path, raw in self._passthrough.items():
            table, _, key = path.partition(".")
            flag = flags[table] + key.replace("_", "-")
            found.append(Fact(path, plain(raw), self._origins[path], flag=flag, chosen=path in self._chosen))
        for policy, own in self.policies.items():
            start = f"{policies.PREFIX}{policy}."
            found.append(Fact(f"{start}role", own.get(policies.ROLE, policies.ROLES[0]), start.rstrip(".")))
            for path in own.keys() & self._schema.options.keys():
                origin = self._origins.get(start + path, start.rstrip("."))
                found.append(Fact(start + self._schema.options[path].fact, plain(own[path]), origin, chosen=True))
        return found

    def for_policy(self, name: str, options: Mapping[str, Any] | None = None, hf_checkpoint: str = "") -> Config:
        """The configuration of one policy: this one with what stands under its name in force.

        Args:
            name: of the policy; one that no file names has no values of its own.
            options: further values of its own, by a key of a configuration file (``lr`` or ``train.lr``).
            hf_checkpoint: its checkpoint; "" leaves what the configuration says.

        Raises:
            ConfigError: no such option, one that the whole run shares, or a value it cannot take.
        """
        where = f"{policies.TABLE}.{name}"
        own = {path: item for path, item in self.policies.get(name, {}).items() if path in self._schema.options}
        for key, item in (options or {}).items():
            own[policies.option_of(self._schema, key, where).path] = item
        if hf_checkpoint:
            own[policies.CHECKPOINT] = hf_checkpoint
        return self.replace(own, origin=where)

    def replace(self, values: Mapping[str, Any], origin: str = "set by the program") -> Config:
        """This configuration with other values, e.g. those a plan's ``sets`` give.

        Args:
            values: option path (or ``table.key`` of a pass-through table) -> value.
            origin: shown wherever the value is; the values count as not chosen by the user.

        Raises:
            ConfigError: no such option, or a value it cannot take.
        """
        changed, passed = dict(self._values), dict(self._passthrough)
        origins, chosen = dict(self._origins), set(self._chosen)
        for path, raw in values.items():
            option = self._schema.find(path)
            if option is None and path.partition(".")[0] in self._schema.passthrough.values():
                passed[path] = raw
                where = path
            else:
                option = option or self._find(path)
                changed[option.path] = value.check(option, raw, origin)
                where = option.path
            origins[where] = origin
            chosen.discard(where)
        return Config(
            self._schema, changed, origins, frozenset(chosen), self.requested, passed, self._active, self.policies
        )

    def with_policies(self, named: Mapping[str, Mapping[str, Any]]) -> Config:
        """This configuration with other values under its policies' names."""
        return Config(
            self._schema,
            self._values,
            self._origins,
            self._chosen,
            self.requested,
            self._passthrough,
            self._active,
            named,
        )

    def activated(self, names: Iterable[str]) -> Config:
        """This configuration with the plugins of the accepted plan, requirements included.

        Raises:
            ConfigError: an option of a plugin outside the plan was given.
        """
        active = tuple(names)
        for path in sorted(self._chosen):
            option = self._schema.options.get(path)
            owners = self._schema.flag_of(path).owners if option else (self._schema.owners[path.partition(".")[0]],)
            if not ({CORE, *active} & set(owners)):
                raise ConfigError(f"{self._origins[path]}: {owners[0]} is not part of this run; add it to --plugins")
        return Config(
            self._schema,
            self._values,
            self._origins,
            self._chosen,
            self.requested,
            self._passthrough,
            active,
            self.policies,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data: chosen values by table, and under ``defaults`` the values nobody chose."""
        shown = {CORE, *self.plugins}
        chosen: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        for path, option in self._schema.options.items():
            if option.owner in shown:
                kept = path in self._chosen or path == f"{ROOT}.plugins"
                table = (chosen if kept else defaults).setdefault(option.group, {})
                table[option.name] = _data(self._values[path])
        for path, raw in self._passthrough.items():
            table_name, _, key = path.partition(".")
            (chosen if path in self._chosen else defaults).setdefault(table_name, {})[key] = raw
        if self.policies:
            tables = {name: policies.as_table(self._schema, own) for name, own in self.policies.items()}
            chosen[policies.TABLE] = {name: _data(table) for name, table in tables.items()}
        return {**chosen, DEFAULTS: defaults}

    def to_yaml(self) -> str:
        """The effective configuration as a file that ``--config`` reads back to an equal one."""
        import yaml

        content = self.to_dict()
        defaults = {DEFAULTS: content.pop(DEFAULTS)}

        def dump(part: dict[str, Any]) -> str:
            return str(yaml.safe_dump(part, sort_keys=False, allow_unicode=True))

        return (
            "# The effective configuration of a run; repeat it with: miles train --config THIS_FILE\n"
            f"{dump(content)}\n"
            "# Values that nobody chose. They are read back as they are; plugins and flags may still change them.\n"
            f"{dump(defaults)}"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(tuple(self.requested))

    def _key(self) -> tuple[Any, ...]:
        shown = {CORE, *self.requested}
        values = {p: self._values[p] for p, o in self._schema.options.items() if o.owner in shown}
        return tuple(self.requested), values, self._passthrough, self.policies

    def __repr__(self) -> str:
        said = ", ".join(f"{path}={self.get(path)!r}" for path in sorted(self._chosen))
        return f"Config({said})"


def plain(item: Any) -> Any:
    """A value as a fact's: bool, int, float, str or None; lists joined by commas."""
    if isinstance(item, (list, tuple)):
        return ",".join(map(str, item))
    return str(item) if isinstance(item, Path) else item


def _data(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return [_data(entry) for entry in item]
    if isinstance(item, dict):
        return {key: _data(entry) for key, entry in item.items()}
    return str(item) if isinstance(item, Path) else item
