"""Prints the results of a search: a table, the time of each phase, and a complete command for each layout."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from miles_core.config.candidates import peek
from miles_planner.search import Result
from miles_planner.sides import Found
from miles_planner.step_time import StepTime
from miles_planner.task import Task, find_changes

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.config.schema import Schema

GB = 1e9
#: Where the numbers of a search come from.
ESTIMATED = (
    "estimated: all memory and seconds, from the GPU's peak rates and measured efficiencies (sources: plugins/planner/miles_planner/rates.toml; "
    "compared with published runs in docs/planning.md)"
)
#: Facts of the hardware that a plan may contain as changes; they are not options.
_HARDWARE = ("gpu.",)


def describe(
    task: Task, result: Result, config: Config, argv: Sequence[str], notes: Sequence[str], as_json: bool = False
) -> str:
    """Format the result of a search as text, or as one JSON object."""
    commands = [command_of(found, config, argv) for found in result.best]
    changed = [list_changes(task, found, config) for found in result.best]
    own = result.own.found
    if as_json:
        rows = [
            _row(found) | {"command": command, "changed": lines}
            for found, command, lines in zip(result.best, commands, changed, strict=True)
        ]
        content = {
            "trainer_layouts": result.trainers,
            "engine_layouts": result.engines,
            "typed": {"seconds": round(own.time.seconds, 1) if own else None, "refused": result.own.refused},
            "best": rows,
            "relaxed": list(result.relaxed),
            "refused": dict(result.refused),
            "misfits": list(result.misfits),
            "one_process": list(result.one_process),
            "assumed": list(notes),
        }
        return json.dumps(content, indent=1)
    lines = [
        _heading(task, result),
        *(f"  assumed: {note}" for note in notes),
        f"  {ESTIMATED}",
        "",
        *_describe_own(result),
    ]
    if result.relaxed:
        flags = [fact.flag for name in result.relaxed if (fact := task.facts.lookup(name)).flag]
        lines += [
            f"layouts that change some of the options given are listed, too; these may change below: {', '.join(flags)}",
            "",
        ]
    if not result.best:
        lines.append("no layout of several processes fits:" if result.one_process else "no layout fits:")
        lines += [f"  {why}" for why in result.misfits]
        lines += [f"  {problem} (the reason for {times} combinations)" for problem, times in result.refused.items()]
    if result.one_process:
        lines += ["", "one process fits, without an estimate of its time (see its memory with miles plan):"]
        lines += [f"    {command}" for command in result.one_process]
    compared = own.time if own and not result.own.refused else None
    for number, (found, command, changes) in enumerate(zip(result.best, commands, changed, strict=True), 1):
        lines += _paragraph(number, found, task, compared)
        lines += [f"   changes: {', '.join(changes)}" if changes else "   changes nothing", f"    {command}", ""]
    return "\n".join(lines).rstrip()


def _describe_own(result: Result) -> list[str]:
    """Describe the run as typed, if its options are a layout."""
    own = result.own
    if own.refused:
        return [f"as typed: refused ({own.refused})", ""]
    if own.found is None:
        return []
    return [f"as typed: {own.found.time.seconds:,.0f} s per step", _describe_times(own.found.time), ""]


def list_changes(task: Task, found: Found, config: Config) -> list[str]:
    """Return what a layout changes in the run as typed, one text per option or plugin."""
    lines = [f"--plugins {name} is added" for name in found.plugins]
    for path, value in find_changes(task.facts, found.changes).items():
        option = config.schema.find(path)
        if option is not None and not path.startswith(_HARDWARE):
            fact = task.facts.lookup(option.fact)
            lines.append(f"{option.flag} {f'{_show(fact.value)} -> ' if fact.chosen else ''}{_show(value)}")
    return lines


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value is None else str(value)


def command_of(found: Found, config: Config, argv: Sequence[str]) -> str:
    """Return the complete command line of a layout: what the user typed, with the options of the layout."""
    flags = flags_of(found, config)
    if found.plugins:
        typed = peek(argv, "--plugins") or (config.run.plugins if config.is_set("plugins") else ())
        names = [name for text in typed for name in text.split(",")]
        flags += ["--plugins", ",".join(dict.fromkeys([*names, *found.plugins]))]
    words = _without(argv, config.schema, [word for word in flags if word.startswith("--")])
    return shlex.join(["miles", "train", *words, *flags])


def flags_of(found: Found, config: Config) -> list[str]:
    """Return the flags of a layout's changes."""
    flags: list[str] = []
    parts = {name: config.get(f"run.{name}") for name in ("runtime", "engine", "trainer")}
    for path, value in {**parts, **found.changes}.items():
        if path.startswith(_HARDWARE):
            continue
        option = config.schema.find(path)
        assert option is not None, path
        if isinstance(value, bool):
            flags.append(option.flag if value else f"--no-{option.flag.removeprefix('--')}")
        elif value is not None:
            flags += [option.flag, str(value)]
    return flags


def _without(argv: Sequence[str], schema: Schema, flags: Sequence[str]) -> list[str]:
    """Return a command line without the options, in any spelling, that ``flags`` set again."""

    def path_of(word: str) -> str:
        name = word.partition("=")[0].replace("_", "-")
        flag = schema.flags.get(name) or schema.flags.get(f"--{name.removeprefix('--no-')}")
        return flag.option.path if flag else ""

    again = {path_of(flag) for flag in flags}
    kept: list[str] = []
    drop = False
    for word in argv:
        if word.startswith("--"):
            drop = path_of(word) in again
        if not drop:
            kept.append(word)
    return kept


def _heading(task: Task, result: Result) -> str:
    w = task.work
    return (
        f"{task.facts.value('model.type')} on {task.gpus} x {task.facts.value('gpu')} ({_machines(task.gpus // task.machine, task.machine)}); "
        f"{w.samples:,} samples per step, prompts of {w.prompt:,.0f} and responses of {w.response:,.0f} tokens (at most {w.longest:,})\n"
        f"{result.trainers:,} layouts of the trainer and {result.engines:,} of the engines divide and fit"
    )


def _describe_turns(found: Found, task: Task) -> str:
    """Describe whether engines generate while the trainer trains, and how old their samples are."""
    lag = task.work.lag or int(found.changes.get("schedule") == "ahead")
    if found.colocated or not lag:
        return "in turns"
    most = "at most " if task.facts.value("schedule") == "async" else ""
    return f"at the same time, samples {most}{lag} step{'s' * (lag > 1)} old"


def _paragraph(number: int, found: Found, task: Task, own: StepTime | None) -> list[str]:
    t, e, s = found.trainer, found.engine, found.time
    where = f"colocated on {t.ranks} GPUs" if found.colocated else f"trainer {t.ranks} GPUs, engines {e.count * e.gpus}"
    experts = f", EP {t.ep}, ETP {t.etp}" if t.ep > 1 or (t.etp > 1 and task.facts.value("model.moe")) else ""
    saved = ["recompute"] * (t.recompute == 1) + ["optimizer on the host"] * bool(t.offloaded)
    peak = max(u.parts.total for u in t.estimate()) / GB
    rows = [
        f"{number}. {s.seconds:,.0f} s per step{_compare(s, own)}: {where}, {_describe_turns(found, task)}",
        f"   trainer: TP {t.tp}, PP {t.pp}, CP {t.cp}{experts}, {t.dp} replica{'s' * (t.dp > 1)}, {t.precision}, micro-batches of {t.tokens:,} tokens"
        f"{''.join(', ' + word for word in saved)}; peak {peak:.0f} GB",
        f"   engines: {e.count} x TP {e.tp}{f', attention DP {e.dp}' if e.dp > 1 else ''}, {e.precision}; "
        f"{s.rollout.running} sequences at once each, cache of {e.cache:,} tokens",
        _describe_times(s),
    ]
    return rows


def _compare(time: StepTime, own: StepTime | None) -> str:
    """Compare the seconds of a step with those of the run as typed."""
    if own is None:
        return ""
    factor = own.seconds / time.seconds
    return f", {factor:.2f} times as fast as typed" if factor >= 1.005 else ", not faster than as typed"


def _describe_times(s: StepTime) -> str:
    return (
        f"   rollout {s.rollout.seconds:,.0f} s ({s.rollout.tokens_per_second:,.0f} tokens/s; full batch {s.rollout.full_rate:,.0f}), "
        f"training {s.training.seconds:,.0f} s (passes {s.training.passes:,.0f}, log-probs {s.training.extra:,.0f}, optimizer "
        f"{s.training.optimizer:,.0f}, moving memory {s.training.moved:,.0f}), sync {s.sync:,.0f} s, other {s.other:,.0f} s"
    )


def _row(found: Found) -> dict[str, Any]:
    t, e = found.trainer, found.engine
    sizes = {
        n: getattr(t, n)
        for n in ("ranks", "tp", "pp", "cp", "ep", "etp", "dp", "tokens", "recompute", "offloaded", "precision")
    }
    peak = max(u.parts.total for u in t.estimate())
    engine = {n: getattr(e, n) for n in ("count", "tp", "dp", "slots", "cache", "precision")}
    return {
        "seconds": round(found.time.seconds, 1),
        "colocated": found.colocated,
        "trainer": {**sizes, "peak_gb": round(peak / GB, 1)},
        "engine": engine,
        "time": asdict(found.time),
        "changes": dict(found.changes),
        "plugins": list(found.plugins),
    }


def _machines(count: int, gpus: int) -> str:
    return f"{count} machine{'s' * (count > 1)} of {gpus}"
