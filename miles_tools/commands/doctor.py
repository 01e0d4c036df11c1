"""``miles doctor``: checks the requirements of a run, shows what each plugin can do here, and describes a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.config.command import Command, CommandParser
from miles_core.observe.environment import Environment, bytes_text, environment, find_version

if TYPE_CHECKING:
    from rich.table import Table

    from miles_formats.convert.memory import Row
    from miles_formats.convert.model_info import ModelInfo


@dataclass(frozen=True)
class Requirement:
    """A distribution that miles-core needs: the installed version (empty if none), and the supported versions."""

    name: str
    version: str
    wanted: str
    ok: bool


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 0 if a run can start here, 2 if a requirement is not met."""
    parser = _parser()
    options, rest, command = parser.parse_own(argv)
    if rest and not options.precision:
        parser.parse_all(argv)
    if options.precision and options.model is None:
        why = "--precision shows a model's memory in that format: give --model DIR"
        raise parser.refuse(why, ["--model", "DIR", *argv])
    if options.precision:
        from miles_formats.convert.installed import describe_unknown, providers

        if options.precision not in (known := providers()):
            problem = describe_unknown(options.precision, known)
            raise parser.refuse_value(problem, argv, options.precision, list(known))
    found = environment()
    needs = requirements()
    model = None
    if options.model is not None:
        from miles_formats.convert.model_info import inspect_model

        model = inspect_model(options.model)
    memory = memory_in(options.model, options.precision, rest, command) if options.precision else []
    plugins = plugin_states(options.model)
    problems = problems_of(needs, found)
    measured = measurements() if options.measure else {}
    if options.json:
        content = {
            "ok": not problems,
            "problems": problems,
            "environment": found.to_dict(),
            "disk_free": shutil.disk_usage(Path.cwd()).free,
            "requirements": [asdict(r) for r in needs],
            "plugins": plugins,
            "measured": measured,
            "model": model and model.to_dict(),
            "memory": [asdict(row) for row in memory],
        }
        print(json.dumps(content, indent=1))
    else:
        show(found, needs, plugins, model, problems)
        if measured:
            show_measured(measured)
        if memory:
            show_memory(options.precision, memory)
    return 2 if any(not r.ok for r in needs) else 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "doctor",
        description="Show versions, hardware, and what each installed plugin can do here; with --model, what a "
        "checkpoint holds and what training it takes.",
    )
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face checkpoint directory to look at")
    parser.add_argument(
        "--precision",
        metavar="FORMAT",
        help="with --model: bytes of its weights in BF16 and in an installed number format, by what they are; options "
        "of miles train that decide what is quantised may follow",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also run the measurements of installed plugins, such as the speed of memory",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def memory_in(model: str, precision: str, options: Sequence[str], command: Command) -> list[Row]:
    """Compute the memory table of a checkpoint in an installed number format.

    Raises:
        ConfigError: no installed plugin has the format, or a weight cannot be stored in it.
        CheckpointError: the checkpoint cannot be read, or is quantised already.
    """
    from miles_core.checkpoint.hf_files import CheckpointFiles
    from miles_core.config.load import load
    from miles_formats.convert.encode import to_format
    from miles_formats.convert.installed import format_class
    from miles_formats.convert.memory import memory_table
    from miles_formats.options import codec_for

    format = format_class(precision)
    config = load(options, command=replace(command, before=("--rollout-precision", precision)))
    return memory_table(to_format(CheckpointFiles(Path(model)), codec_for(format, config, model)).items)


def requirements() -> list[Requirement]:
    """Return the requirements in miles-core's metadata with the installed versions."""
    import platform
    from importlib.metadata import metadata, requires

    from packaging.requirements import Requirement as Line
    from packaging.specifiers import SpecifierSet

    wanted = SpecifierSet(metadata("miles-core")["Requires-Python"] or "")
    version = platform.python_version()
    rows = [Requirement("python", version, str(wanted), wanted.contains(version, prereleases=True))]
    for line in map(Line, requires("miles-core") or ()):
        if line.marker is None or line.marker.evaluate({"extra": ""}):
            here = find_version(line.name)
            ok = bool(here) and line.specifier.contains(here, prereleases=True)
            rows.append(Requirement(line.name, here, str(line.specifier), ok))
    return rows


def problems_of(needs: Sequence[Requirement], found: Environment) -> list[str]:
    """Return a message for each problem, with the command that fixes it."""
    lines = []
    for need in needs:
        if not need.ok:
            have = f"{need.version} is installed" if need.version else "it is not installed"
            fix = f"pip install '{need.name}{need.wanted}'" if need.name != "python" else "use another interpreter"
            lines.append(f"{need.name} {need.wanted} is needed and {have}: {fix}")
    if found.gpus and "+cpu" in found.packages.get("torch", ""):
        lines.append(
            f"this machine has {len(found.gpus)} GPU(s), but torch {found.packages['torch']} is a CPU build: "
            "install a CUDA build, see https://pytorch.org/get-started/locally"
        )
    return lines


#: Kinds of parts that a run selects exactly one of. A plugin that provides one is checked as if a run had selected it.
_SELECTED = ("engine", "trainer", "runtime")


def plugin_states(model: str | None) -> list[dict[str, str]]:
    """Return for every installed plugin whether it is usable on this host (and with this model) by itself, or why not. Options that it needs
    are no reason, because a run can set them."""
    from miles_core.config.load import load
    from miles_core.errors import PluginError
    from miles_core.plugin.check import check
    from miles_core.run.prepare import catalogue_for, facts_for
    from miles_tools.authoring.explain import emulated_here

    config = load(["--hf-checkpoint", model] if model else [])
    catalogue, facts = catalogue_for(config), facts_for(config)
    options = {fact.name for fact in facts.values() if fact.flag}
    rows = []
    for name in catalogue.names:
        row = {"name": name, "version": "", "summary": "", "source": catalogue.sources[name]}
        try:
            if name in catalogue.broken:
                raise PluginError(catalogue.broken[name])
            plugin = catalogue[name]
        except PluginError as error:
            rows.append({**row, "state": "broken", "why": str(error)})
            continue
        row |= {"version": plugin.version, "summary": plugin.summary}
        selected = [
            replace(facts[kind], value=part) for kind in _SELECTED for part in list(plugin.provides.get(kind, ()))[:1]
        ]
        problems = check([name], catalogue, facts.with_facts(selected)).problems
        reasons = [f"{p.headline}, because {p.because}" for p in problems if {fact for fact, *_ in p.values} - options]
        why = "with --emulate-precision: this machine lacks its tensor cores" if emulated_here(plugin, facts) else ""
        rows.append({**row, "state": "not here" if reasons else "usable", "why": "; ".join(reasons) or why})
    return rows


def measurements() -> dict[str, dict[str, str]]:
    """Run the plugins' measurements of this host; returns the results by plugin."""
    from miles_core.plugin.discovery import discover
    from miles_core.plugin.load import import_target

    asked = {name: plugin.measures for name, plugin in discover().items() if plugin.measures}
    return {name: dict(import_target(name, target)()) for name, target in asked.items()}


def show_measured(measured: Mapping[str, Mapping[str, str]]) -> None:
    """Print the plugins' measurements."""
    from rich.console import Console

    rows = [(name, label, text) for name, texts in measured.items() for label, text in texts.items()]
    Console().print(_table("Measured", ("plugin", "what", ""), rows))


def show(
    found: Environment,
    needs: Sequence[Requirement],
    plugins: Sequence[dict[str, str]],
    model: ModelInfo | None,
    problems: Sequence[str],
) -> None:
    """Print everything as tables."""
    from rich.console import Console

    console = Console()
    console.print(_hardware(found))
    console.print(_table("Packages", ("package", "version", "needed", ""), [_requirement(r) for r in needs]))
    rows = [
        (p["name"], p["version"], _mark(p["state"] == "usable", p["state"]), p["why"] or p["summary"]) for p in plugins
    ]
    if rows:
        console.print(_table("Plugins", ("plugin", "version", "state", "what it does, or why not here"), rows))
    else:
        console.print("No plugins are installed; the core trains without any.\n")
    if model is not None:
        console.print(_table(f"Model {model.directory}", ("", ""), _model_rows(model, found)))
    for problem in problems:
        console.print(f"[red]problem:[/red] {problem}")
    if not problems:
        console.print("Everything a run needs is here. Try it: miles demo")


def show_memory(precision: str, rows: Sequence[Row]) -> None:
    """Print the memory table."""
    from rich.console import Console

    columns = ("weights", "tensors", "quantised", "bf16", precision, "smaller")
    lines = [
        (r.name, r.tensors, r.quantized, bytes_text(r.bf16), bytes_text(r.after), f"{r.bf16 / max(r.after, 1):.2f} x")
        for r in rows
    ]
    Console().print(_table(f"Memory in {precision}", columns, lines))


def _hardware(found: Environment) -> Table:
    gpus = [
        (f"GPU {i}", f"{g.name}, {bytes_text(g.memory)} ({bytes_text(g.free)} free), sm_{g.sm}, driver {g.driver}")
        for i, g in enumerate(found.gpus)
    ]
    rows = [
        ("system", f"{found.platform}, Python {found.python}"),
        ("processor", f"{found.processor}, {found.cpus} threads"),
        ("memory", bytes_text(found.memory) if found.memory else "unknown"),
        *(gpus or [("GPU", f"none: {found.no_gpu}")]),
        ("disk", f"{bytes_text(shutil.disk_usage(Path.cwd()).free)} free in {Path.cwd()}"),
        *([("imports", found.imports)] if found.imports else []),
    ]
    return _table("This machine", ("", ""), rows)


def _model_rows(model: ModelInfo, found: Environment) -> list[tuple[str, ...]]:
    config = model.config
    dtypes = ", ".join(f"{dtype} {count:,}" for dtype, count in model.dtypes.items())
    rows: list[tuple[str, ...]] = [
        ("architecture", f"{', '.join(config.get('architectures') or ['unknown'])} (type {config.get('model_type')})"),
        ("parameters", f"{model.parameters:,} ({dtypes}), {bytes_text(model.nbytes)} on disk"),
        ("context", f"{model.context:,} tokens" if model.context else "config.json does not say"),
        (
            "tokenizer",
            f"{model.tokenizer or 'none found'}, {'with' if model.chat_template else 'without'} chat template",
        ),
    ]
    if model.expert_layers:
        routers = f"{model.routers} routers found" if model.routers else "no router found by name"
        rows.insert(2, ("experts", f"in {model.expert_layers} layers, {routers}; {model.active:,} parameters a token"))
    for dtype, needed in model.training_bytes.items():
        rows.append(
            (f"train, {dtype} copy", f"{bytes_text(needed)} + activations and KV cache: {_fits(needed, found)}")
        )
    return rows


def _fits(needed: int, found: Environment) -> str:
    """Describe whether ``needed`` bytes fit into one GPU and into host memory."""
    places = []
    if found.gpus:
        size = min(g.memory for g in found.gpus)
        places.append("fits one GPU" if needed < 0.9 * size else f"needs {-(-needed // int(0.9 * size))} GPUs, sharded")
    if found.memory:
        places.append("fits the memory here" if needed < 0.9 * found.memory else "does not fit the memory here")
    return ", ".join(places) or "memory unknown"


def _requirement(need: Requirement) -> tuple[str, ...]:
    state = "ok" if need.ok else "missing" if not need.version else "wrong version"
    return need.name, need.version, need.wanted, _mark(need.ok, state)


def _mark(good: bool, text: str) -> str:
    return f"[green]{text}[/green]" if good else f"[yellow]{text}[/yellow]"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return table
