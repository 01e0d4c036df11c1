"""``miles convert``: converts a checkpoint to any installed number format, or back to BF16, file by file."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.config.command import Command, CommandParser
from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.plugin.manifest import Plugin
    from miles_formats.convert.conversion import Conversion, Outcome
    from miles_formats.convert.shaped import Shape, Units

USAGE = "miles convert --to FORMAT --model-dir DIR --save-dir DIR [--dry-run] [options of the format]"
PLAIN = "bf16"
#: Core's options that, in addition to a format's own, exclude weights from quantisation.
SHARED = re.compile(r"--(plugins|config|num-layers-at-(start|end)-in-bf16|extra-high-precision-layers-hf)")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def run(argv: Sequence[str]) -> int:
    """Run the command. Raises MilesError for invalid arguments or checkpoints."""
    words = list(argv)
    if "-h" in words or "--help" in words:
        print(_help(words))
        return 0
    parser = _parser()
    options, rest, command = parser.parse_own(words)
    if options.to is None and (found := _change(rest)):
        return _changed(*found, options, rest, command)
    missing = [
        flag for flag, value in (("--to FORMAT", options.to), ("--model-dir DIR", options.model_dir)) if not value
    ]
    missing += [] if options.save_dir or options.dry_run else ["--save-dir DIR"]
    if missing:
        from miles_core.config.load import load

        if rest:
            load(rest, command=command)  # reports an unknown flag, which may be one of the missing
        line = [*words, *(word for text in missing for word in text.split())]
        raise parser.refuse(f"miles convert needs {' and '.join(missing)}", line)
    _check_format(parser, words, options.to, rest)
    conversion = _plan(options, rest, command)
    for note in conversion.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.dry_run:
        if options.save_dir:
            from miles_formats.convert.conversion import check_places

            check_places(conversion, options.save_dir)
        print(_as_json(conversion) if options.json else _listing(conversion, options.verbose))
        return 0
    from miles_formats.convert.conversion import run as convert

    with _progress(conversion.before) as advance:
        outcome = convert(conversion, options.save_dir, options.workers, options.shard_size, advance)
    print(_summary(conversion, outcome, options.json))
    return 0


def _change(rest: Sequence[str]) -> tuple[Plugin, str] | None:
    """Return the plugin whose checkpoint-changing flag is given, and that flag; None without such a flag."""
    from miles_core.config.load import schema_for

    given = {word.partition("=")[0] for word in rest}
    for plugin in schema_for(rest).manifests.values():
        for flag in plugin.converts:
            if flag in given:
                return plugin, flag
    return None


def _changed(plugin: Plugin, flag: str, options: argparse.Namespace, rest: Sequence[str], command: Command) -> int:
    """Let ``plugin`` write the checkpoint, and print its message."""
    missing = [
        word for word, value in (("--model-dir", options.model_dir), ("--save-dir", options.save_dir)) if not value
    ]
    if missing:
        raise ConfigError(f"miles convert {flag} needs {' and '.join(f'{word} DIR' for word in missing)}")
    if options.dry_run or options.json:
        raise ConfigError(f"miles convert {flag}: --dry-run and --json go with --to FORMAT; leave them out")
    from miles_core.config.load import load
    from miles_core.plugin.load import import_target

    config = load(rest, command=replace(command, before=("--plugins", plugin.name)))
    _refuse_foreign(config, plugin)
    change = import_target(plugin.name, plugin.converts[flag])
    print(change(options.model_dir, options.save_dir, config.plugin(plugin.name)))
    return 0


def _parser() -> CommandParser:
    made = CommandParser("convert", usage=USAGE, description=__doc__, add_help=False)
    made.add_argument("--to", metavar="FORMAT", help="an installed number format, or bf16 to dequantise")
    made.add_argument("--model-dir", metavar="DIR", type=_path, help="the Hugging Face checkpoint to read")
    made.add_argument("--save-dir", metavar="DIR", type=_path, help="where to write; must not exist, or be empty")
    made.add_argument("--dry-run", action="store_true", help="list the planned changes, from headers alone, and stop")
    made.add_argument("--verbose", action="store_true", help="with --dry-run: list every tensor, not groups")
    made.add_argument(
        "--workers", type=_count, default=2, metavar="N", help="number of weights converted in parallel (default: 2)"
    )
    made.add_argument(
        "--shard-size",
        type=_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="maximum size of a weight file, e.g. 2GB (default: 5GB)",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--help", "-h", action="store_true", help="show this help")
    return made


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 256")
    return int(text)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", text.strip().upper())
    size = float(found[1]) * _UNITS[found[2] if found[2] in _UNITS else found[2] + "B"] if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 5GB or 500MB")
    return int(size)


def _check_format(parser: CommandParser, words: list[str], name: str, rest: list[str]) -> None:
    from miles_core.config.load import schema_for
    from miles_formats.convert.installed import describe_unknown, providers

    known = providers(schema_for(rest).manifests)
    if name not in (*known, PLAIN):
        raise parser.refuse_value(describe_unknown(name, known), words, name, [*known, PLAIN])


def _plan(options: argparse.Namespace, rest: list[str], command: Command) -> Conversion:
    if options.to == PLAIN:
        if rest:
            raise ConfigError(f"{rest[0]}: dequantising takes no options; the checkpoint says how it is stored")
        return _plan_plain(options.model_dir)
    from miles_core.config.load import load, schema_for
    from miles_formats.convert.installed import format_class, providers

    manifests = schema_for(rest).manifests
    known = providers(manifests)
    config = load(rest, command=replace(command, before=("--rollout-precision", options.to)))
    named = [manifests[name] for name in config.plugins if name in manifests] if config.is_set("plugins") else []
    changing = [plugin for plugin in named if options.to not in plugin.formats]
    _refuse_foreign(config, known[options.to], *changing)
    from miles_core.checkpoint.hf_files import CheckpointFiles
    from miles_formats.convert.encode import to_format
    from miles_formats.options import codec_for

    codec = codec_for(format_class(options.to, manifests), config, str(options.model_dir))
    shape, changed_by = _shape(config, options) if changing else (None, "")
    conversion = to_format(CheckpointFiles(options.model_dir), codec, shape)
    conversion.changed_by = changed_by
    return conversion


def _shape(config: Config, options: argparse.Namespace) -> tuple[Shape | None, str]:
    """Return the change of the weights by the plugins in ``--plugins``, and its identity: plugins and their options. None if no plugin
    changes weights."""
    from miles_core.plugin.boundary import compose
    from miles_core.run.make import make_run
    from miles_core.run.prepare import apply_plan, prepare

    given = {"model.hf_checkpoint": str(options.model_dir), "train.emulate_precision": True}
    config = config.replace(given, origin="of the conversion")
    plan, catalogue = prepare(config)
    config = apply_plan(config, plan)
    run = make_run(config, plan, catalogue, Path(options.save_dir or "."))
    if not run.hooks.implemented["wrap_weights"]:
        return None, ""

    def shape(units: Units) -> Units:
        chain = run.hooks.chain("wrap_weights", run=run, policy=run.policy, purpose="convert")
        shaped: Units = compose(units, chain)
        return shaped

    active = [(p, config.plugin(p.name) if catalogue[p.name].config else None) for p in plan.plugins]
    return shape, "; ".join(f"{p.name} {p.version} {p.source} {own!r}" for p, own in active)


def _plan_plain(directory: Path) -> Conversion:
    from miles_core.errors import CheckpointError
    from miles_formats.convert.decode import open_quantized, to_bf16

    source = open_quantized(directory)
    if source is None:
        raise CheckpointError(
            f"--model-dir {directory} is not quantised (its config.json has no quantization_config), so there is "
            "nothing to dequantise; give a number format with --to"
        )
    return to_bf16(source)


def _refuse_foreign(config: Config, *plugins: Plugin) -> None:
    """Raise ConfigError for options that do not affect the conversion."""
    for path, option in config.schema.options.items():
        allowed = SHARED.fullmatch(option.flag) or option.flag == "--rollout-precision"
        owners = config.schema.flag_of(path).owners
        if config.is_set(path) and not allowed and not {*owners} & {plugin.name for plugin in plugins}:
            raise ConfigError(f"{config.origin(path)}: it has no effect on a checkpoint's conversion; leave it out")


def _help(words: Sequence[str]) -> str:
    """Return the help text: the command's options and, for every installed format, the options of its plugin."""
    from miles_core.config.flags import describe, metavar
    from miles_core.config.load import schema_for
    from miles_formats.convert.installed import providers

    made = _parser()
    schema = schema_for([w for w in words if w not in ("-h", "--help")])
    shared = made.add_argument_group(
        "any format", "weights to leave unquantised, in addition to those that a format never quantises"
    )
    for flag in schema.distinct_flags():
        if SHARED.fullmatch(flag.spelling) and flag.spelling not in ("--plugins", "--config"):
            shared.add_argument(flag.spelling, help=describe(flag).replace("%", "%%"), metavar=metavar(flag.option))
    shown: set[str] = set()
    for plugin in {p.name: p for p in providers(schema.manifests).values()}.values():
        group = made.add_argument_group(f"--to {' or '.join(plugin.formats)}", plugin.summary.replace("%", "%%"))
        for flag in schema.distinct_flags():
            if plugin.name in flag.owners and flag.spelling not in shown:
                shown.add(flag.spelling)
                text = describe(flag).replace("%", "%%")
                kind: dict[str, Any] = (
                    {"action": "store_true"} if flag.option.is_bool else {"metavar": metavar(flag.option)}
                )
                group.add_argument(flag.spelling, help=text, **kind)
    for plugin in schema.manifests.values():
        for name in plugin.converts:
            group = made.add_argument_group(f"{name}, without --to", plugin.summary.replace("%", "%%"))
            flag = next(f for f in schema.distinct_flags() if f.spelling == name)
            group.add_argument(name, help=describe(flag).replace("%", "%%"), metavar=metavar(flag.option))
    return made.format_help().rstrip()


def _listing(conversion: Conversion, verbose: bool) -> str:
    """List the planned changes; tensors whose names differ only in numbers and that change equally share a line."""
    groups: dict[tuple[str, tuple[int, ...], str], list[Any]] = {}
    for item in conversion.items:
        name = item.name if verbose else re.sub(r"\.\d+(?=\.)", ".*", item.name)
        groups.setdefault((name, item.shape, item.reason), []).append(item)
    lines = []
    for (name, shape, reason), items in groups.items():
        count = f"{len(items)} x " if not verbose else ""
        what = f"{count}{list(shape)}"
        before, after = sum(i.before for i in items), sum(i.after for i in items)
        fate = f"kept: {reason}" if reason else f"{conversion.to}  {_bytes(before)} -> {_bytes(after)}"
        lines.append(f"  {name:<62} {what:<24} {fate}")
    return "\n".join([*lines, "", _totals(conversion)])


def _totals(conversion: Conversion) -> str:
    before, after = conversion.before, conversion.after
    changed = conversion.changed
    return (
        f"{len(changed)} of {len(conversion.items)} tensors become {conversion.to}; weights {_bytes(before)} -> "
        f"{_bytes(after)} ({before / max(after, 1):.2f} to 1)"
    )


def _summary(conversion: Conversion, outcome: Outcome, as_json: bool) -> str:
    pace = (outcome.before - outcome.resumed) / max(outcome.seconds, 1e-9) / 1e6
    if as_json:
        content = {
            "to": conversion.to,
            "directory": str(outcome.directory),
            "files": outcome.shards,
            "bytes_before": outcome.before,
            "bytes_after": outcome.after,
            "bytes_resumed": outcome.resumed,
            "seconds": round(outcome.seconds, 3),
            "notes": [*conversion.notes, *outcome.notes],
        }
        return json.dumps(content)
    resumed = f", {_bytes(outcome.resumed)} of it done before" if outcome.resumed else ""
    notes = [f"note: {note}" for note in outcome.notes]
    took = f"{outcome.seconds:.1f} s, {pace:.0f} MB/s{resumed}"
    return "\n".join(
        [*notes, _totals(conversion), f"wrote {outcome.directory} ({outcome.shards} weight files, {took})"]
    )


def _as_json(conversion: Conversion) -> str:
    content = {
        "to": conversion.to,
        "bytes_before": conversion.before,
        "bytes_after": conversion.after,
        "tensors": [
            {
                "name": i.name,
                "shape": i.shape,
                "to": "" if i.reason else conversion.to,
                "kept_because": i.reason,
                "bytes_before": i.before,
                "bytes_after": i.after,
            }
            for i in conversion.items
        ],
        "files": {name: json.loads(text) for name, text in conversion.texts.items()},
    }
    return json.dumps(content)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show progress on standard error: a bar with rate and remaining time on a terminal, else a line every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total)
        return
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


class _Lines:
    """Prints a line of progress every ``every`` seconds."""

    def __init__(self, total: int, every: float = 10.0) -> None:
        self.total, self.every, self.done = total, every, 0
        self.start = self.last = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        now = time.monotonic()
        if now - self.last < self.every:
            return
        self.last = now
        rate = self.done / (now - self.start)
        left = (self.total - self.done) / rate if rate else 0.0
        print(
            f"converted {_bytes(self.done)} of {_bytes(self.total)}, {rate / 1e6:.0f} MB/s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def _bytes(count: float) -> str:
    from miles_core.observe.environment import bytes_text

    return bytes_text(int(count))
