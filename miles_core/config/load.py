"""Load a checked ``Config`` from flags, files and the environment.

Precedence, lowest first: defaults, environment, the run continued by ``--load``, files, flags.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.config import file, foreign_flags, policies, value
from miles_core.config.candidates import collect_plugins, peek
from miles_core.config.command import TRAIN, Command
from miles_core.config.config import Config
from miles_core.config.effects import find_idle, undecide
from miles_core.config.flags import Assignment, Source, parse
from miles_core.config.owners import backends_of, choose_owner, with_requirements
from miles_core.config.rules import explain_stretched_decay, find_rule_violations
from miles_core.config.schema import CORE, ROOT, Option, Schema, collect
from miles_core.errors import ConfigError
from miles_core.plugin.activate import SELECTED
from miles_core.plugin.discovery import Catalogue, is_file
from miles_core.plugin.facts import Facts
from miles_core.plugin.load import find_part
from miles_core.plugin.manifest import Plugin
from miles_core.redact import MARK

PLUGINS = f"{ROOT}.plugins"
#: Rank of the options that the user set for the run continued by ``--load``: below ``--config`` files and their defaults.
CONTINUED = -2
#: Name of a configuration received from another process, in messages.
SENT = "the configuration that was sent"


def load(
    argv: Sequence[str],
    *,
    manifests: Iterable[Plugin] | Mapping[str, Plugin] | None = None,
    environment: Mapping[str, str] | None = None,
    command: Command = TRAIN,
) -> Config:
    """Load the configuration of a command line.

    Args:
        argv: flags, e.g. ``["--config", "run.yaml", "--lr", "1e-6"]``.
        manifests: the plugins that declare options; by default all installed plugins and the single files in ``--plugins``.
        environment: by default ``os.environ``; only variables that a manifest declares are read.
        command: the command of the options, to which it may add some.

    Raises:
        ConfigError: flags, files, variables or values are invalid; one message reports all problems.
        PluginError: a plugin's manifest cannot be loaded, or two packages declare the same flag differently.
    """
    try:
        return _load(argv, manifests, environment, command)
    except _InvalidConfiguration as invalid:
        raise ConfigError(_explain_problems(argv, invalid, environment, command)) from None


class _InvalidConfiguration(ConfigError):
    """All problems of a configuration.

    Attributes:
        problems: error messages, one per problem.
        schema: the schema of all options.
        missing: flags that would enable the plugins of the options in use, flag -> value.
    """

    def __init__(self, problems: Sequence[str], schema: Schema, missing: Mapping[str, str]) -> None:
        super().__init__(_message(problems))
        self.problems, self.schema, self.missing = list(dict.fromkeys(problems)), schema, missing


def _explain_problems(
    argv: Sequence[str], invalid: _InvalidConfiguration, environment: Mapping[str, str] | None, command: Command
) -> str:
    """Return the error message for a command line, with a corrected line if one is known."""

    def attempt(line: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        try:
            _load(line, invalid.schema.manifests, environment, command)
        except _InvalidConfiguration as again:
            return again.problems, dict(again.missing)
        return [], {}

    correct = find_part("correction", "command_line") if command.words else None
    corrected = correct(argv, invalid.schema, invalid.problems, attempt, command) if correct else ""
    return corrected or _message(invalid.problems)


def _load(
    argv: Sequence[str],
    manifests: Iterable[Plugin] | Mapping[str, Plugin] | None,
    environment: Mapping[str, str] | None,
    command: Command,
) -> Config:
    """Implement ``load``; raises ``_InvalidConfiguration``."""
    argv = [*command.before, *argv, *command.after]
    files = {path: file.read(path) for path in peek(argv, "--config")}
    before = _read_continued_run(argv)
    schema = collect_plugins(argv, {**files, **before}) if manifests is None else collect(manifests)
    line = parse(schema, argv, command.flags)
    problems = line.problems
    continued: dict[str, Any] = {}
    for path, entries in before.items():
        assignments, wrong = file.assignments(
            _filter_continued(entries, schema, argv), schema, path, rank=0, saved=True
        )
        weaker = [dataclasses.replace(a, rank=CONTINUED if a.chosen else CONTINUED - 1) for a in assignments]
        line.assignments += weaker
        continued |= {a.path: a.raw for a in assignments}
        problems += wrong
    for rank, path in enumerate(line.files):
        assignments, wrong = file.assignments(files[path], schema, path, rank)
        line.assignments += assignments
        problems += wrong
    environment = os.environ if environment is None else environment
    line.assignments += _from_environment(schema, environment)
    problems += foreign_flags.explain_environment(environment, schema)
    return _build_config(schema, line.assignments, problems, continued)


def loads(text: str, manifests: Iterable[Plugin] | Mapping[str, Plugin]) -> Config:
    """Load a configuration from the text of ``Config.to_yaml``. Ignores the flags and environment of this process.

    Raises:
        ConfigError: the text sets an option that ``manifests`` do not declare.
    """
    schema = collect(manifests)
    return _build_config(schema, *file.assignments(file.read_yaml(text, SENT), schema, SENT, 0))


def _read_continued_run(argv: Sequence[str]) -> dict[str, list[file.Entry]]:
    """Read the configuration of the run that ``--load`` continues: path -> entries. Empty without ``--load``."""
    for load_path in peek(argv, "--load")[-1:]:
        source = Path(load_path).expanduser().resolve()
        for directory in (source, source.parent, source.parent.parent):  # a run, its checkpoints, one of them
            if (directory / "config.yaml").is_file() and (directory / "checkpoints").is_dir():
                path = str(directory / "config.yaml")
                return {path: file.read(path)}
    return {}


def _filter_continued(entries: list[file.Entry], schema: Schema, argv: Sequence[str]) -> list[file.Entry]:
    """Drop a continued run's ``save`` and ``load`` paths, and the options of plugins that ``--plugins`` no longer names."""
    named = [word for text in peek(argv, "--plugins") for word in text.split(",")]
    gone = {t for t, owner in schema.owners.items() if named and owner != CORE and owner not in named}

    def filter_entry(entry: file.Entry) -> file.Entry:
        children = entry.children
        if entry.key == ROOT and children is not None:
            children = tuple(c for c in children if c.key not in ("save", "load", "plugins" if named else ""))
        elif entry.key == file.DEFAULTS and children is not None:
            children = tuple(filter_entry(c) for c in children if c.key not in gone)
        return dataclasses.replace(entry, children=children)

    return [filter_entry(entry) for entry in entries if entry.key not in gone]


def schema_for(argv: Sequence[str]) -> Schema:
    """Return the schema of core, all installed plugins and the single-file plugins of a command line, as ``--help`` shows it."""
    return collect_plugins(argv, {path: file.read(path) for path in peek(argv, "--config")})


def _from_environment(schema: Schema, environment: Mapping[str, str]) -> list[Assignment]:
    assignments = []
    for variable, path in schema.environment.items():
        option = schema.find(path)
        if variable in environment and option is not None:
            origin = f"environment variable {variable}={environment[variable]}"
            assignments.append(Assignment(option.path, environment[variable], origin, Source.ENVIRONMENT, variable))
    return assignments


def _build_config(
    schema: Schema, assignments: Sequence[Assignment], problems: list[str], continued: Mapping[str, Any] | None = None
) -> Config:
    """Build a configuration from assignments; raises ``_InvalidConfiguration`` with ``problems`` and all further ones.

    Args:
        continued: option path -> value of the run that is continued.
    """
    builder = _ConfigBuilder(schema, assignments, problems)
    config = builder.build()
    complete = {a.path for a in assignments if MARK not in str(a.raw)}
    for a in assignments:
        if MARK in str(a.raw) and a.path not in complete:
            problems.append(f"{a.origin}: a run directory does not keep credentials; give the value of {a.path} again")
    facts = Facts(config.facts())
    if jump := explain_stretched_decay(config.get, continued or {}):
        problems.append(jump)
    problems += find_rule_violations(facts, builder.inherited_defaults())
    problems += [
        idle.message for idle in find_idle(schema, undecide(facts, schema), config.plugins) if not idle.harmless
    ]
    for name in config.policies:
        problems += [
            f"policies.{name}: {message}" for message in find_rule_violations(Facts(config.for_policy(name).facts()))
        ]
    if problems:
        raise _InvalidConfiguration(problems, schema, builder.missing)
    return config


def _message(problems: Sequence[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return f"{len(unique)} problems in the configuration:\n" + "\n".join(f"  - {problem}" for problem in unique)


class _ConfigBuilder:
    """Resolves the assignments to each option, checks values, and determines the requested plugins."""

    def __init__(self, schema: Schema, assignments: Sequence[Assignment], problems: list[str]) -> None:
        self.schema = schema
        self.problems = problems
        self.assignments = sorted(assignments, key=lambda a: (a.source, a.rank))  # stable: the last flag wins
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.chosen: set[str] = set()
        self.passthrough: dict[str, Any] = {}
        self.wrong: set[str] = set()  # flags with an invalid value
        self.missing: dict[str, str] = {}  # flags that would enable the plugins of the options in use

    def build(self) -> Config:
        """Build the configuration; appends an error message to ``problems`` for each problem."""
        by_path: dict[str, list[Assignment]] = {}
        of_policies = [a for a in self.assignments if a.path.startswith(policies.PREFIX)]
        own, origins = policies.check_assignments(self.schema, of_policies, self.problems)
        for assignment in self.assignments:
            if not assignment.path.startswith(policies.PREFIX):
                by_path.setdefault(assignment.path, []).append(assignment)
        for path, given in by_path.items():
            self._resolve(path, given)
        if policies.CHECKPOINT not in self.values and own:  # planning needs a model: use that of the first policy
            first, values = next(iter(own.items()))
            if policies.CHECKPOINT in values:
                self.values[policies.CHECKPOINT] = values[policies.CHECKPOINT]
                self.origins[policies.CHECKPOINT] = origins[f"{policies.PREFIX}{first}.{policies.CHECKPOINT}"]
                self.chosen.add(policies.CHECKPOINT)
        named = self._collect_named()
        requested = self._collect_requested(named)
        requested |= self._enable_owners(self._find_idle(by_path, requested))
        if requested:
            self.values[PLUGINS] = tuple(named.get(name, name) for name in requested)
            self.origins.setdefault(PLUGINS, ", ".join(requested.values()))
        self._report_idle(self._find_idle(by_path, requested))
        chosen = frozenset(self.chosen)
        return Config(
            self.schema, self.values, self.origins | origins, chosen, requested, self.passthrough, policies=own
        )

    def inherited_defaults(self) -> dict[str, Any]:
        """Return option path -> default, for options whose value comes from the configuration of the continued run."""
        last = {a.path: a for a in self.assignments if a.path in self.schema.options}
        return {path: self.schema.options[path].default for path, a in last.items() if a.rank == CONTINUED}

    def _resolve(self, path: str, given: list[Assignment]) -> None:
        """Use the assignment with the highest precedence. Different values of two flags or two lines of one file are a problem."""
        last = given[-1]
        rivals = [a for a in given if (a.source, a.rank) == (last.source, last.rank)]
        self.origins[path] = last.origin
        if last.chosen:
            self.chosen.add(path)
        if last.passthrough:
            self.passthrough[path] = last.raw
            return
        option = self.schema.options[path]
        try:
            if option.is_list and last.source is Source.FLAG:
                raws = [item for a in rivals for item in value.as_list(a.raw)]
                self.values[path] = value.check(option, raws, last.origin)
                return
            checked = [(value.check(option, a.raw, a.origin), a) for a in rivals]
        except ConfigError as error:
            if option.flag not in self.wrong:  # report a flag of several packages once
                self.problems.append(self._explain_value(option, rivals, str(error)))
            self.wrong.add(option.flag)
            return
        self.values[path] = checked[-1][0]
        for other, assignment in checked[:-1]:
            if assignment.spelling != last.spelling and other != self.values[path]:
                twice = f"{other} ({assignment.origin}) and {self.values[path]} ({last.origin})"
                self.problems.append(f"{option.fact} is given twice: {twice}")

    def _explain_value(self, option: Option, rivals: Sequence[Assignment], message: str) -> str:
        for assignment in rivals:
            sentence = foreign_flags.explain_value(option, assignment.raw, self.schema)
            if sentence:
                return f"{assignment.origin}: {sentence}"
        return message

    def _collect_named(self) -> dict[str, str]:
        """Return the plugins that ``--plugins`` names: name -> item, which may be the path of a single file."""
        named: dict[str, str] = {}
        for spec in self.values.get(PLUGINS, ()):
            name = Catalogue().request(spec) if is_file(spec) else spec
            if name in self.schema.manifests:
                named.setdefault(name, spec)
            else:
                self.problems.append(f"{self.origins[PLUGINS]}: {foreign_flags.explain_plugin(spec, self.schema)}")
        return named

    def _collect_requested(self, named: Iterable[str]) -> dict[str, str]:
        """Return requested plugin -> origin: the ``named`` plugins, and those that other options enable.

        The plan adds the plugins that provide the selected backends and number formats (``plugin.activate``).
        """
        origin = self.origins.get(PLUGINS, "")
        requested = dict.fromkeys(named, "--plugins" if origin.startswith("--plugins") else origin)
        for path, item in self.values.items():
            option = self.schema.options[path]
            if option.enables_with(item):
                requested.setdefault(option.owner, self.origins[path])
            providers = option.providers.get(item, ()) if isinstance(item, str) else ()
            standard = any(self.schema.manifests[name].standard for name in providers)  # a part of every run
            if standard or item in (*option.info.choices, option.default) or requested.keys() & set(providers):
                continue
            if len(providers) > 1:
                self.problems.append(
                    f"{self.origins[path]}: {value.format_choices(providers)} provide it; name one of them in --plugins"
                )
            elif option.info.part not in SELECTED:
                requested |= dict.fromkeys(providers, self.origins[path])
        return requested

    def _providers(self) -> set[str]:
        """Return the plugins that provide the selected parts, including defaults."""
        providers = (
            o.providers.get(self.values.get(path, o.default)) for path, o in self.schema.options.items() if o.info.part
        )
        return {name for names in providers for name in names or ()}

    def _find_idle(
        self, by_path: Mapping[str, list[Assignment]], plugins: Iterable[str]
    ) -> dict[tuple[str, ...], list[Assignment]]:
        """Return the values of options that only installed plugins outside this run have: owners -> assignments."""
        possible = {CORE, *with_requirements(self.schema, [*plugins, *self._providers()])}
        idle: dict[tuple[str, ...], list[Assignment]] = {}
        for path, given in by_path.items():
            last = given[-1]
            option = self.schema.options.get(path)
            owners = self.schema.flag_of(path).owners if option else (self.schema.owners[path.partition(".")[0]],)
            harmless = option is not None and option.info.enables and not option.enables_with(self.values.get(path))
            # an invalid value of an option that enables the plugin; already reported
            invalid = option is not None and option.flag in self.wrong and bool(option.info.part or option.info.enables)
            if not (possible & set(owners) or not last.chosen or harmless or invalid):
                idle.setdefault(tuple(owners), []).append(last)
        return idle

    def _enable_owners(self, idle: Mapping[tuple[str, ...], list[Assignment]]) -> dict[str, str]:
        """Return the plugins that the user's options imply (``owners.choose_owner``): plugin -> origin.

        A backend that such a plugin provides is selected. Environment variables imply no plugin: they may be set for other programs.
        """
        enabled: dict[str, str] = {}
        for owners, given in sorted(idle.items(), key=lambda entry: len(entry[0])):
            origins = [a.origin for a in given if a.source is not Source.ENVIRONMENT]
            taken = {*enabled, *self._providers()}
            owner = choose_owner(self.schema, owners, [a.spelling for a in given], taken, self.chosen)
            if not origins or not owner:
                continue
            for path, name in backends_of(self.schema, owner).items():
                self.values[path] = name
                self.origins[path] = f"selected by {origins[0]}"
            enabled[owner] = origins[0]
        return enabled

    def _report_idle(self, idle: Mapping[tuple[str, ...], list[Assignment]]) -> None:
        """Report options of installed plugins that this run does not enable."""
        if not idle:
            return
        self.missing = self._flags_to_enable([owners[0] for owners in idle])
        flags = " ".join(word for pair in self.missing.items() for word in pair)
        for owners, given in idle.items():
            named = dict.fromkeys(
                assignment.origin for assignment in given
            )  # a flag may be an option of several plugins
            origins, they = ", ".join(named), ("they belong", "are") if len(named) > 1 else ("it belongs", "is")
            unset = " or unset it" if given[-1].source is Source.ENVIRONMENT else ""
            self.problems.append(
                f"{origins}: {they[0]} to the plugin {' or '.join(owners)}, which is installed but not enabled; add {flags}{unset}"
            )

    def _flags_to_enable(self, owners: Sequence[str]) -> dict[str, str]:
        """Return the flags that enable plugins: a flag that selects a provided backend, or else ``--plugins``."""
        flags: dict[str, str] = {}
        names: list[str] = []
        for owner in dict.fromkeys(owners):
            backends = {self.schema.options[path].flag: name for path, name in backends_of(self.schema, owner).items()}
            flags |= backends
            names += [] if backends else [owner]
        return {**flags, "--plugins": ",".join([*self.values.get(PLUGINS, ()), *names])} if names else flags
