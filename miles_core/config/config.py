"""The configuration of a run: the value and the origin of every option."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from miles_core.config import groups, policies, value
from miles_core.config.evaluation_group import Evaluation
from miles_core.config.file import DEFAULTS
from miles_core.config.rollout_group import Rollout
from miles_core.config.schema import CORE, ROOT, Option, Schema
from miles_core.config.yaml_scalars import dump
from miles_core.errors import ConfigError, PluginError
from miles_core.nearest import did_you_mean
from miles_core.plugin.activate import SELECTED
from miles_core.plugin.facts import Fact


class Config:
    """Checked values of all options. Immutable.

    ``config.rollout.temperature`` reads an option of core, ``config.plugin("mine").threshold`` an option of a plugin. Two
    configurations are equal if they request the same plugins and all values are equal, regardless of origins.

    Attributes:
        requested: requested plugin -> origin of the request (``"--plugins mine,yours"``), in order.
        plugins: names of the enabled plugins: the requested ones and those that provide the selected backends and number formats;
            after ``with_plugins``, those of the plan.
        policies: name of each policy in the configuration file -> its own values (``miles_core.config.policies``).
    """

    run: groups.Run
    model: groups.Model
    data: groups.Data
    rollout: Rollout
    reward: groups.Reward
    algorithm: groups.Algorithm
    train: groups.Train
    sft: groups.Sft
    evaluation: Evaluation
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
            values: option path -> checked value; missing options have their defaults.
            origins: option path or pass-through path -> origin of the value.
            chosen: paths of the values that a user set.
            requested: plugin -> origin of the request.
            passthrough: ``table.key`` -> value, for tables that accept any key.
            active: the plugins of the accepted plan; None before planning.
            policies: policy name -> its own values (option path, ``role`` or ``generates`` -> checked value).
        """
        self._schema = schema
        self._values = {path: values.get(path, option.default) for path, option in schema.options.items()}
        self._origins = dict(origins)
        self._chosen = chosen
        self._passthrough = dict(passthrough)
        self.requested = dict(requested)
        self.plugins = (*self.requested, *self._find_selected()) if active is None else active
        self._active = active
        self.policies: dict[str, dict[str, Any]] = {name: dict(own) for name, own in (policies or {}).items()}
        self._groups: dict[str, Any] = {}
        for table, group in schema.groups.items():
            fields = {o.name: self._values[o.path] for o in schema.options.values() if o.group == table}
            self._groups[table] = self.__dict__[table] = group(**fields)
            if hasattr(type(self), table):
                raise PluginError(
                    f"a plugin may not be called {table!r}: configurations have an attribute with that name"
                )

    def _find_selected(self) -> Iterator[str]:
        """Yield the plugins that provide a backend or number format other than the default, unless a requested plugin provides it."""
        options = [option for option in self._schema.options.values() if option.info.part in SELECTED]
        chosen = [(o, self._values[o.path]) for o in options if self._values[o.path] != o.default]
        providers = [option.providers.get(name, ()) for option, name in chosen]
        found = dict.fromkeys(name for names in providers if not {*names} & {*self.requested} for name in names)
        yield from (name for name in found if not self._schema.manifests[name].standard)

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def trains_on_older(self) -> bool:
        """Whether samples may have tokens of older weights than the trained ones."""
        return self.run.schedule != "sync" or bool(self.rollout.partial_rollout)

    def group(self, table: str) -> Any:
        """Return the dataclass instance of a table of core or of a plugin."""
        if table not in self._groups:
            raise KeyError(f"no option group {table!r}{did_you_mean(table, self._groups, '; ')}")
        return self._groups[table]

    def __getattr__(self, name: str) -> Any:
        """Refuse an unknown table. Tables of core and plugins are attributes: ``config.rollout``, ``config.mine``."""
        tables = self.__dict__.get("_groups", {})
        raise AttributeError(f"the configuration has no table {name!r}{did_you_mean(name, tables, '; ')}")

    def plugin(self, name: str) -> Any:
        """Return the options of a plugin, an instance of its config dataclass."""
        return self.group(name)

    def passthrough(self, table: str) -> dict[str, Any]:
        """Return the options passed through to other software: key -> value, unchecked."""
        start = table + "."
        return {path[len(start) :]: item for path, item in self._passthrough.items() if path.startswith(start)}

    def get(self, path: str) -> Any:
        """Return the value of an option path (``rollout.temperature``), a fact name (``engine``) or a pass-through path."""
        return self._passthrough[path] if path in self._passthrough else self._values[self._find(path).path]

    def origin(self, path: str) -> str:
        """Return the origin of a value: ``"default"``, ``"--lr 1e-6"``, ``"run.yaml line 4"``, ``"set by mine"``."""
        if path in self._passthrough:
            return self._origins[path]
        return self._origins.get(self._find(path).path, "default")

    def is_set(self, path: str) -> bool:
        """Whether a user set this value by a flag, file or environment variable."""
        return path in self._chosen or (path not in self._passthrough and self._find(path).path in self._chosen)

    def _find(self, path: str) -> Option:
        option = self._schema.find(path)
        if option is None:
            raise ConfigError(f"there is no option {path}{did_you_mean(path, self._schema.options, '; ')}")
        return option

    @property
    def args(self) -> Namespace:
        """A new flat namespace for custom functions (``args.rollout_temperature``), including plugins' options."""
        return Namespace(**self._argument_values)

    @cached_property
    def _argument_values(self) -> dict[str, Any]:
        shown = {CORE, *self.plugins}
        return {
            option.flag[2:].replace("-", "_"): self._values[option.path]
            for option in self._schema.options.values()
            if option.owner in shown
        }

    def facts(self) -> list[Fact]:
        """Return every option and every pass-through value as a fact. Facts of the group ``run`` have no prefix."""
        facts = []
        for path, option in self._schema.options.items():
            origin, chosen = self.origin(path), path in self._chosen
            item = plain(self._values[path])
            choices = (False, True) if option.is_bool else option.choices
            fixed = option.info.fixed
            if option.name == "use" and item is False and not chosen and not self._switched_on(option.owner):
                item, origin = True, self.origin("plugins")  # naming a plugin has the same effect as its switch
            facts.append(Fact(option.fact, item, origin, flag=option.flag, choices=choices, chosen=chosen, fixed=fixed))
        flags = {table: prefix for prefix, table in self._schema.passthrough.items()}
        for path, raw in self._passthrough.items():
            table, _, key = path.partition(".")
            flag = flags[table] + key.replace("_", "-")
            facts.append(Fact(path, plain(raw), self._origins[path], flag=flag, chosen=path in self._chosen))
        for policy, own in self.policies.items():
            start = f"{policies.PREFIX}{policy}."
            role = own.get(policies.ROLE, policies.ROLES[0])
            facts.append(Fact(f"{start}role", role, start.rstrip(".")))
            generates = own.get(policies.GENERATES)
            facts.append(
                Fact(f"{start}generates", role == "train" if generates is None else generates, start.rstrip("."))
            )
            for path in own.keys() & self._schema.options.keys():
                origin = self._origins.get(start + path, start.rstrip("."))
                facts.append(Fact(start + self._schema.options[path].fact, plain(own[path]), origin, chosen=True))
        return facts

    def _switched_on(self, plugin: str) -> bool:
        """Whether a plugin is disabled, or enabled by one of its own flags instead of by its name."""
        options = (o for o in self._schema.options.values() if o.owner == plugin)
        return plugin not in self.plugins or any(o.enables_with(self._values[o.path]) for o in options)

    def for_policy(self, name: str, options: Mapping[str, Any] | None = None, hf_checkpoint: str = "") -> Config:
        """Return the configuration of one policy: this configuration with the policy's own values applied.

        Args:
            name: name of the policy; a policy without a table in the file has no values of its own.
            options: additional values, by key of a configuration file (``lr`` or ``train.lr``).
            hf_checkpoint: the policy's checkpoint; "" keeps the configured one.

        Raises:
            ConfigError: an option does not exist, applies only to the whole run, or has an invalid value.
        """
        where = f"{policies.TABLE}.{name}"
        own = {path: item for path, item in self.policies.get(name, {}).items() if path in self._schema.options}
        for key, item in (options or {}).items():
            # a program may keep one policy's model on another device; the key of a file may not
            own[key if key == policies.DEVICE else policies.option_of(self._schema, key, where).path] = item
        if hf_checkpoint:
            own[policies.CHECKPOINT] = hf_checkpoint
        return self.replace(own, origin=where)

    def replace(self, values: Mapping[str, Any], origin: str = "set by the program") -> Config:
        """Return a copy of this configuration with other values, for example those of a plan's ``sets``.

        Args:
            values: option path (or ``table.key`` of a pass-through table) -> value.
            origin: origin of the values in messages; the values do not count as set by the user.

        Raises:
            ConfigError: an option does not exist or has an invalid value.
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
        return self._copy(values=changed, origins=origins, chosen=frozenset(chosen), passthrough=passed)

    def with_policies(self, named: Mapping[str, Mapping[str, Any]]) -> Config:
        """Return a copy of this configuration with other values for its policies."""
        return self._copy(policies=named)

    def with_plugins(self, names: Iterable[str]) -> Config:
        """Return a copy of this configuration with the plugins of the accepted plan, including requirements."""
        return self._copy(active=tuple(names))

    def _copy(self, **changes: Any) -> Config:
        """Return a copy of this configuration; ``changes`` are arguments of the constructor."""
        own = {
            "values": self._values,
            "origins": self._origins,
            "chosen": self._chosen,
            "requested": self.requested,
            "passthrough": self._passthrough,
            "active": self._active,
            "policies": self.policies,
        }
        return Config(self._schema, **(own | changes))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data: the values set by the user by table, and all other values under ``defaults``."""
        shown = {CORE, *self.plugins}
        chosen: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        for path, option in self._schema.options.items():
            if option.owner in shown:
                is_chosen = path in self._chosen or path == f"{ROOT}.plugins"
                table = (chosen if is_chosen else defaults).setdefault(option.group, {})
                table[option.name] = _data(self._values[path])
        for path, raw in self._passthrough.items():
            table_name, _, key = path.partition(".")
            (chosen if path in self._chosen else defaults).setdefault(table_name, {})[key] = raw
        if self.policies:
            tables = {name: policies.as_table(self._schema, own) for name, own in self.policies.items()}
            chosen[policies.TABLE] = {name: _data(table) for name, table in tables.items()}
        return {**chosen, DEFAULTS: defaults}

    def to_yaml(self) -> str:
        """Return the effective configuration as YAML; loading it with ``--config`` gives an equal configuration."""
        content = self.to_dict()
        defaults = {DEFAULTS: content.pop(DEFAULTS)}
        return (
            "# The effective configuration of a run; repeat it with: miles train --config THIS_FILE\n"
            f"{dump(content)}\n"
            "# Default values. They are read back unchanged; plugins and flags may still change them.\n"
            f"{dump(defaults)}"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(tuple(self.requested))

    def _key(self) -> tuple[Any, ...]:
        shown = {CORE, *self.requested, *self._find_selected()}
        values = {p: self._values[p] for p, o in self._schema.options.items() if o.owner in shown}
        return tuple(self.requested), values, self._passthrough, self.policies

    def __repr__(self) -> str:
        values = ", ".join(f"{path}={self.get(path)!r}" for path in sorted(self._chosen))
        return f"Config({values})"


def plain(item: Any) -> Any:
    """Convert an option's value to a fact's value: bool, int, float, str or None; lists are joined by commas."""
    if isinstance(item, (list, tuple)):
        return ",".join(map(str, item))
    return str(item) if isinstance(item, Path) else item


def _data(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return [_data(entry) for entry in item]
    if isinstance(item, dict):
        return {key: _data(entry) for key, entry in item.items()}
    return str(item) if isinstance(item, Path) else item
