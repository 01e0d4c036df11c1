"""``miles plugins``: lists installed plugins; ``check``, ``explain NAME``, ``matrix``, ``new NAME``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.cli.plan import collect_facts, make_parser
from miles_core.config.command import Command, CommandParser
from miles_core.errors import PluginError
from miles_core.plugin.load import import_target

if TYPE_CHECKING:
    from miles_core.plugin.discovery import Catalogue
    from miles_core.plugin.facts import Facts

USAGE = """miles plugins [--json] [options of miles train]
       miles plugins check [options of miles train]
       miles plugins explain NAME [--fact NAME=VALUE] [--hardware GPU] [options of miles train]
       miles plugins matrix [--only NAME,...] [--workers N] [--save FILE.jsonl] [--markdown]
       miles plugins new NAME [--format] [--dir DIR]"""


def run(argv: Sequence[str]) -> int:
    """Run the list or one of the subcommands."""
    words = list(argv)
    if words[:1] == ["new"]:
        return _new(words[1:])
    if words[:1] == ["matrix"]:  # of the test kit, which is a layer above
        matrix: Callable[[Sequence[str]], int] = import_target("bundled", "miles_testing.matrix_command:run")
        return matrix(words[1:])
    if words[:1] == ["explain"]:
        return _explain(words[1:])
    if words[:1] == ["check"]:
        return _check(words[1:])
    if words and not words[0].startswith("-"):
        raise CommandParser("plugins").refuse_word(words, ("check", "explain", "new"))
    return _list(words)


def _situation(rest: Sequence[str], options: argparse.Namespace, command: Command) -> tuple[Any, Catalogue, Facts]:
    from miles_core.config.load import load
    from miles_core.run.prepare import catalogue_for, facts_for

    config = load(rest, command=command)
    return config, catalogue_for(config), facts_for(config, collect_facts(options))


def _list(argv: Sequence[str]) -> int:
    """Print a table of the installed plugins; ``state`` is whether the plugin by itself is usable on this host."""
    options, rest, command = make_parser("plugins", USAGE, "List the installed plugins.").parse_own(argv)
    config, catalogue, facts = _situation(rest, options, command)
    rows = [_row(name, catalogue, facts, config.plugins) for name in catalogue.names]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(_table(rows))
    return 0


def _row(name: str, catalogue: Catalogue, facts: Facts, enabled: Sequence[str]) -> dict[str, str]:
    from miles_core.plugin.check import check
    from miles_core.plugin.scan import hooks_of
    from miles_tools.authoring.explain import emulated_here

    row = {"name": name, "distribution": catalogue.sources[name]}
    try:
        if name in catalogue.broken:
            raise PluginError(catalogue.broken[name])
        plugin = catalogue[name]
        hooks = " ".join(hooks_of(plugin))
    except PluginError as error:
        return {
            **row,
            "version": "",
            "summary": "",
            "hooks": "",
            "claims": "",
            "pairs": "",
            "state": f"broken: {error}",
        }
    problems = check([name], catalogue, facts).problems
    state = "active" if name in enabled else "usable"
    if emulated_here(plugin, facts):
        state += " with --emulate-precision here"
    return {
        **row,
        "version": plugin.version,
        "summary": plugin.summary,
        "hooks": hooks,
        "claims": " ".join(plugin.claims),
        "pairs": " ".join(f"{p.rollout}x{p.train}" for p in plugin.pairs),
        "state": f"refused here: {problems[0].headline}" if problems else state,
    }


def _table(rows: Sequence[dict[str, str]]) -> str:
    lines = []
    for row in rows:
        lines.append(f"{row['name']} {row['version']}  ({row['distribution']})  {row['state'].splitlines()[0]}")
        for key in ("summary", "hooks", "claims", "pairs"):
            lines += [f"    {key:<8} {row[key]}"] if row[key] else []
    return "\n".join(lines)


def _check(argv: Sequence[str]) -> int:
    """Resolve the given options, and lint every installed manifest."""
    made = make_parser("plugins check", USAGE, "Resolve without running; find mistakes in manifests.")
    options, rest, command = made.parse_own(argv)
    from miles_core.contracts.hooks import HOOKS
    from miles_core.plugin.render import list_notices
    from miles_core.plugin.resolve import resolve
    from miles_tools.authoring.explain import lint

    config, catalogue, facts = _situation(rest, options, command)
    found = [f"{name}: {line}" for name, m in catalogue.items() for line in lint(m, catalogue, facts, HOOKS)]
    found += [
        f"{name}: importing its manifest imports torch; refer to code that needs torch as 'module:name'"
        for name in catalogue.heavy
    ]
    found += [f"{name}: {why}" for name, why in catalogue.broken.items()]
    plan = resolve(config.requested, catalogue, facts)
    print("\n".join([f"ok: {plan.header}", *list_notices(plan)]))
    if found:
        raise PluginError("these manifests have mistakes:\n" + "\n".join(f"  {line}" for line in found))
    print(f"{len(catalogue)} manifests checked")
    return 0


def _explain(argv: Sequence[str]) -> int:
    """Print each constraint of a plugin with its reason and its result here."""
    made = make_parser("plugins explain", USAGE, "Explain a plugin's constraints.")
    made.add_argument("name", help="an installed plugin, or the path of a single-file one")
    options, rest, command = made.parse_own(argv)
    from miles_core.plugin.check import check
    from miles_tools.authoring.explain import explain

    config, catalogue, facts = _situation(rest, options, replace(command, before=("--plugins", options.name)))
    name = catalogue.request(options.name)
    checked = check(config.requested, catalogue, facts)
    print(explain(catalogue[name], checked, catalogue.sources.get(name, "")))
    return 0


def _new(argv: Sequence[str]) -> int:
    """Generate a working third-party plugin."""
    made = CommandParser("plugins new", description=_new.__doc__)
    made.add_argument("name", help="lower-case letters, digits and _")
    made.add_argument("--dir", type=Path, metavar="DIR", help="where to write (default: ./miles-plugin-NAME)")
    made.add_argument("--format", action="store_true", help="a number format with its contract tests")
    options = made.parse_all(argv)
    from miles_tools.authoring.scaffold import write_plugin

    files = write_plugin(options.name, options.dir, options.format)
    print("\n".join(str(path) for path in files))
    print(f"next: pip install -e {files[0].parent} && python -m pytest {files[0].parent}")
    return 0
