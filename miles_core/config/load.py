"""From argv, files and the environment to a checked ``Config``: default < environment < continued run < file < flag."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.config import elsewhere, file, policies, value
from miles_core.config.config import Config
from miles_core.config.flags import Assignment, Source, parse
from miles_core.config.rules import broken
from miles_core.config.schema import CORE, ROOT, Option, Schema, collect
from miles_core.config.translate import translate
from miles_core.errors import ConfigError, PluginError
from miles_core.plugin.activate import BACKENDS
from miles_core.plugin.manifest import Plugin
from miles_core.redact import MARK

if TYPE_CHECKING:
    from miles_core.plugin.discovery import Catalogue

PLUGINS = f"{ROOT}.plugins"
#: What messages call a configuration that came from another process.
SENT = "the configuration that was sent"


def load(
    argv: Sequence[str],
    *,
    manifests: Iterable[Plugin] | Mapping[str, Plugin] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The configuration that a command line describes.

    Args:
        argv: flags, e.g. ``["--config", "run.yaml", "--lr", "1e-6"]``.
        manifests: the plugins whose options exist; by default all installed ones and the single files in ``--plugins``.
        environment: by default ``os.environ``; only variables that a manifest declares are read.

    Raises:
        ConfigError: everything wrong with flags, files, variables and values, in one message.
        PluginError: a plugin's manifest cannot be loaded, or two packages declare one flag differently.
    """
    try:
        return _load(argv, manifests, environment)
    except _Refused as refused:
        raise ConfigError(_explained(argv, refused, environment)) from None


class _Refused(ConfigError):
    """Everything wrong with a configuration.

    Attributes:
        problems: one sentence each.
        schema: what can be configured.
        missing: flags that enable the plugins whose options were given, flag -> value.
    """

    def __init__(self, problems: Sequence[str], schema: Schema, missing: Mapping[str, str]) -> None:
        super().__init__(_message(problems))
        self.problems, self.schema, self.missing = list(dict.fromkeys(problems)), schema, missing


def _explained(argv: Sequence[str], refused: _Refused, environment: Mapping[str, str] | None) -> str:
    """What is wrong with a command line. Where translating other programs' flags and enabling the plugins that its flags need solves
    problems, that line, and what is wrong with it still, takes their place."""
    line, changed = translate(argv, refused.schema)
    rest = refused.problems
    for _ in range(2):  # the plugins that its flags need, and those that their translation needs
        try:
            _load(line, refused.schema.manifests, environment)
            rest = []
            break
        except _Refused as again:
            rest = again.problems
            line = _with_plugins(line, again.missing)
    if len(refused.problems) < 2 or len(rest) >= len(refused.problems):
        return _message(refused.problems)
    dropped = [flag for flag, (_, here) in changed.items() if not here]
    listed = [f"  {typed} -> {here}" for typed, here in changed.values() if here]
    listed += [f"  without meaning here: {', '.join(dropped)}"] if dropped else []
    listed += [f"  {sentence}" for flag in dropped if (sentence := elsewhere.from_elsewhere(flag))]
    solved = "all of them" if not rest else f"{len(refused.problems) - len(rest)} of them"
    head = f"{len(refused.problems)} problems in the configuration; the command line below solves {solved}"
    left = "; what is left:\n" + "\n".join(f"  - {problem}" for problem in rest) if rest else ""
    about = "translated:\n" + "\n".join(listed) + "\n\n" if listed else ""
    return f"{head}{left}\n\n{about}with these flags, and all plugins that they need:\n  {shlex.join(line)}"


def _with_plugins(argv: Sequence[str], missing: Mapping[str, str]) -> list[str]:
    """A command line with flags that enable plugins; the value of ``--plugins``, which names all of them, takes the place of an earlier
    one."""
    line, missing = list(argv), dict(missing)
    if "--plugins" in line and "--plugins" in missing:
        line[line.index("--plugins") + 1] = missing.pop("--plugins")
    return [*line, *(word for pair in missing.items() for word in pair)]


def _load(
    argv: Sequence[str],
    manifests: Iterable[Plugin] | Mapping[str, Plugin] | None,
    environment: Mapping[str, str] | None,
) -> Config:
    """See ``load``; raises ``_Refused``."""
    files = {path: file.read(path) for path in _peek(argv, "--config")}
    before = _continued(argv)
    schema = collect(_installed(argv, {**files, **before}) if manifests is None else manifests)
    given = parse(schema, argv)
    problems = given.problems
    for path, entries in before.items():
        found, wrong = file.assignments(_still_meant(entries, schema, argv), schema, path, rank=0)
        given.assignments += [
            dataclasses.replace(a, rank=a.rank - 2) for a in found
        ]  # weaker than any file that is named
        problems += wrong
    for rank, path in enumerate(given.files):
        found, wrong = file.assignments(files[path], schema, path, rank)
        given.assignments += found
        problems += wrong
    environment = os.environ if environment is None else environment
    given.assignments += _from_environment(schema, environment)
    problems += elsewhere.explain_environment(environment, schema)
    return _checked(schema, given.assignments, problems)


def loads(text: str, manifests: Iterable[Plugin] | Mapping[str, Plugin]) -> Config:
    """The configuration whose ``Config.to_yaml`` was sent here; flags and environment of this process are not asked.

    Raises:
        ConfigError: the manifests here do not know what the text sets.
    """
    schema = collect(manifests)
    return _checked(schema, *file.assignments(file.read_yaml(text, SENT), schema, SENT, 0))


def _continued(argv: Sequence[str]) -> dict[str, list[file.Entry]]:
    """The configuration of the run that ``--load`` continues, which holds where nothing else is said; by its path."""
    for given in _peek(argv, "--load")[-1:]:
        source = Path(given).expanduser().resolve()
        for directory in (source, source.parent, source.parent.parent):  # a run, its checkpoints, one of them
            if (directory / "config.yaml").is_file() and (directory / "checkpoints").is_dir():
                path = str(directory / "config.yaml")
                return {path: file.read(path)}
    return {}


def _still_meant(entries: list[file.Entry], schema: Schema, argv: Sequence[str]) -> list[file.Entry]:
    """A continued run's entries without the places of that run, and without the options of plugins that ``--plugins`` leaves out."""
    named = [word for text in _peek(argv, "--plugins") for word in text.split(",")]
    gone = {t for t, owner in schema.owners.items() if named and owner != CORE and owner not in named}

    def kept(entry: file.Entry) -> file.Entry:
        children = entry.children
        if entry.key == ROOT and children is not None:
            children = tuple(c for c in children if c.key not in ("save", "load", "plugins" if named else ""))
        elif entry.key == file.DEFAULTS and children is not None:
            children = tuple(kept(c) for c in children if c.key not in gone)
        return dataclasses.replace(entry, children=children)

    return [kept(entry) for entry in entries if entry.key not in gone]


def schema_for(argv: Sequence[str]) -> Schema:
    """What can be configured here, the single-file plugins of this command line included (``--help`` shows it)."""
    return collect(_installed(argv, {path: file.read(path) for path in _peek(argv, "--config")}))


def _installed(argv: Sequence[str], files: Mapping[str, list[file.Entry]]) -> Catalogue:
    """The manifests of all installed plugins, and of the single files that ``--plugins`` names.

    Raises:
        PluginError: a plugin that ``--plugins`` names cannot be imported, or two of them cannot be had together; others are
            left out.
    """
    from miles_core.plugin.discovery import discover

    catalogue = discover()
    wanted = [catalogue.request(n) for n in _named_plugins(argv, files) if is_local(n) or n in catalogue]
    set_aside_rivals(catalogue, wanted)
    return catalogue


def set_aside_rivals(catalogue: Catalogue, wanted: Sequence[str] = ()) -> None:
    """Two installed plugins may want one flag, alias or variable: that is no matter until both take part. Of those that cannot be
    had together the wanted ones stay, then the first by name; the others become ``broken``, with the reason."""
    try:
        collect(catalogue)
        return
    except PluginError:
        pass  # some two of them
    kept = [catalogue[name] for name in wanted]
    collect(kept)
    for plugin in [p for name, p in catalogue.items() if name not in wanted]:
        try:
            collect([*kept, plugin])
            kept.append(plugin)
        except PluginError as error:
            catalogue.set_aside(plugin.name, str(error))


def _peek(argv: Sequence[str], flag: str) -> list[str]:
    """The values of one flag, before the schema is known."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(flag, action="append")
    try:
        known, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:  # the full parser reports the missing value
        return []
    return getattr(known, flag[2:]) or []


def _named_plugins(argv: Sequence[str], files: Mapping[str, list[file.Entry]]) -> list[str]:
    """What ``--plugins`` names on the command line or, when it is not there, in files."""
    named: list[Any] = [*_peek(argv, "--plugins")]
    if not named:
        for entries in files.values():
            for entry in entries:
                inner = entry.children if entry.key == ROOT and entry.children is not None else (entry,)
                named += [e.value for e in inner if e.key.lstrip("-") == "plugins"]
    words = [word for item in named for word in (item if isinstance(item, list) else str(item).split(","))]
    return list(dict.fromkeys(str(word) for word in words if word))


def is_local(name: str) -> bool:
    """Whether an item of ``--plugins`` is the path of a single-file plugin."""
    return name.endswith(".py") or "/" in name or "\\" in name


def _from_environment(schema: Schema, environment: Mapping[str, str]) -> list[Assignment]:
    found = []
    for variable, path in schema.environment.items():
        option = schema.find(path)
        if variable in environment and option is not None:
            origin = f"environment variable {variable}={environment[variable]}"
            found.append(Assignment(option.path, environment[variable], origin, Source.ENVIRONMENT, variable))
    return found


def _checked(schema: Schema, assignments: Sequence[Assignment], problems: list[str]) -> Config:
    loading = _Loading(schema, assignments, problems)
    config = loading.config()
    given = {a.path for a in assignments if MARK not in str(a.raw)}
    for a in assignments:
        if MARK in str(a.raw) and a.path not in given:
            problems.append(f"{a.origin}: a run directory does not keep credentials; give the value of {a.path} again")
    problems += broken(config.facts())
    for name in config.policies:
        problems += [f"policies.{name}: {sentence}" for sentence in broken(config.for_policy(name).facts())]
    if problems:
        raise _Refused(problems, schema, loading.missing)
    return config


def _message(problems: Sequence[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return f"{len(unique)} problems in the configuration:\n" + "\n".join(f"  - {problem}" for problem in unique)


class _Loading:
    """Chooses among the assignments to each option, checks values, and finds out which plugins are enabled."""

    def __init__(self, schema: Schema, assignments: Sequence[Assignment], problems: list[str]) -> None:
        self.schema = schema
        self.problems = problems
        self.assignments = sorted(assignments, key=lambda a: (a.source, a.rank))  # stable: later on the line wins
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.chosen: set[str] = set()
        self.passthrough: dict[str, Any] = {}
        self.wrong: set[str] = set()  # flags whose value was refused
        self.missing: dict[str, str] = {}  # flags that enable the plugins whose options were given

    def config(self) -> Config:
        by_path: dict[str, list[Assignment]] = {}
        named = [a for a in self.assignments if a.path.startswith(policies.PREFIX)]
        own, origins = policies.settled(self.schema, named, self.problems)
        for assignment in [a for a in self.assignments if a not in named]:
            by_path.setdefault(assignment.path, []).append(assignment)
        for path, given in by_path.items():
            self._settle(path, given)
        if policies.CHECKPOINT not in self.values and own:  # what is planned needs a model: the first policy's
            first, values = next(iter(own.items()))
            if policies.CHECKPOINT in values:
                self.values[policies.CHECKPOINT] = values[policies.CHECKPOINT]
                self.origins[policies.CHECKPOINT] = origins[f"{policies.PREFIX}{first}.{policies.CHECKPOINT}"]
                self.chosen.add(policies.CHECKPOINT)
        requested = self._requested()
        self._refuse_idle_plugins(by_path, tuple(requested))
        chosen = frozenset(self.chosen)
        return Config(
            self.schema, self.values, self.origins | origins, chosen, requested, self.passthrough, policies=own
        )

    def _settle(self, path: str, given: list[Assignment]) -> None:
        """The strongest assignment wins; two flags (or two places of one file) that contradict each other do not."""
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
            if option.flag not in self.wrong:  # a flag of several packages is refused once
                self.problems.append(self._explained(option, rivals, str(error)))
            self.wrong.add(option.flag)
            return
        self.values[path] = checked[-1][0]
        for other, assignment in checked[:-1]:
            if assignment.spelling != last.spelling and other != self.values[path]:
                twice = f"{other} ({assignment.origin}) and {self.values[path]} ({last.origin})"
                self.problems.append(f"{option.fact} is given twice: {twice}")

    def _explained(self, option: Option, rivals: Sequence[Assignment], message: str) -> str:
        for assignment in rivals:
            sentence = elsewhere.explain_value(option, assignment.raw, self.schema)
            if sentence:
                return f"{assignment.origin}: {sentence}"
        return message

    def _requested(self) -> dict[str, str]:
        """Plugin -> what asked for it; ``run.plugins`` becomes the whole list, so that a saved file repeats it."""
        specs: dict[str, str] = {}
        origins: dict[str, str] = {}
        for spec in self.values.get(PLUGINS, ()):
            name = self._name_of(spec)
            if name in self.schema.manifests:
                specs.setdefault(name, spec)
                origins.setdefault(name, self.origins[PLUGINS])
            else:
                self.problems.append(f"{self.origins[PLUGINS]}: {elsewhere.explain_plugin(spec, self.schema)}")
        for path, item in self.values.items():
            option = self.schema.options[path]
            if option.info.enables and item not in (None, False):
                specs.setdefault(option.owner, option.owner)
                origins.setdefault(option.owner, self.origins[path])
            providers = option.providers.get(item, ()) if isinstance(item, str) else ()
            if providers and item not in (*option.info.choices, option.default) and not set(providers) & set(specs):
                if len(providers) > 1:
                    self.problems.append(
                        f"{self.origins[path]}: {value.listing(providers)} provide it; name one of them in --plugins"
                    )
                else:
                    specs[providers[0]] = providers[0]
                    origins[providers[0]] = self.origins[path]
        if specs:
            self.values[PLUGINS] = tuple(specs.values())
            self.origins.setdefault(PLUGINS, ", ".join(origins.values()))
        return origins

    def _providers(self) -> set[str]:
        """Who provides a part that is in force, also one that nobody chose."""
        found = (
            o.providers.get(self.values.get(path, o.default)) for path, o in self.schema.options.items() if o.info.part
        )
        return {name for names in found for name in names or ()}

    def _name_of(self, spec: str) -> str:
        """The plugin's name for an item of ``--plugins``; a single file is known by its path."""
        if not is_local(spec):
            return spec
        from miles_core.plugin.discovery import name_of_file

        return name_of_file(spec)

    def _refuse_idle_plugins(self, by_path: Mapping[str, list[Assignment]], plugins: Sequence[str]) -> None:
        possible = {CORE, *_with_requirements(self.schema, plugins), *self._providers()}
        idle: dict[tuple[str, ...], list[Assignment]] = {}
        for path, given in by_path.items():
            last = given[-1]
            option = self.schema.options.get(path)
            owners = self.schema.flag_of(path).owners if option else (self.schema.owners[path.partition(".")[0]],)
            harmless = option is not None and option.info.enables and self.values.get(path) in (None, False)
            # a value that would have enabled the plugin, had it been a right one
            refused = option is not None and option.flag in self.wrong and bool(option.info.part or option.info.enables)
            if not (possible & set(owners) or not last.chosen or harmless or refused):
                idle.setdefault(tuple(owners), []).append(last)
        if not idle:
            return
        self.missing = self._enabling([owners[0] for owners in idle])
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

    def _enabling(self, owners: Sequence[str]) -> dict[str, str]:
        """Flags that enable these plugins: one that selects the backend it provides, ``--plugins`` for the others."""
        found: dict[str, str] = {}
        names: list[str] = []
        for owner in dict.fromkeys(owners):
            backends = [
                (option.flag, next(iter(self.schema.manifests[owner].provides[option.info.part])))
                for option in self.schema.options.values()
                if option.info.part in BACKENDS and option.info.part in self.schema.manifests[owner].provides
            ]
            found |= dict(backends)
            names += [] if backends else [owner]
        return {**found, "--plugins": ",".join([*self.values.get(PLUGINS, ()), *names])} if names else found


def _with_requirements(schema: Schema, plugins: Iterable[str]) -> set[str]:
    """These plugins and all that a rule of theirs may activate (``needs = "plugin.x"``)."""
    found: set[str] = set()
    waiting = list(plugins)
    while waiting:
        name = waiting.pop()
        if name not in found and name in schema.manifests:
            found.add(name)
            for rule in schema.manifests[name].requires:
                needs = rule.needs.strip()
                if needs.startswith("plugin."):
                    waiting.append(needs.removeprefix("plugin.").split()[0])
    return found
