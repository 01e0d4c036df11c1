"""The output of ``miles verify``: tables on the terminal, and an HTML page with the same numbers and two plots."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.mismatch.gap import Gap
from miles_core.precision.quantizer import TENSORS
from miles_core.version import __version__
from miles_tools.output_file import make_folder, write_file
from miles_tools.report.budget_table import BUDGET_COLUMNS, budget_rows
from miles_tools.report.mismatch_plots import draw_budget, draw_gap
from miles_tools.verify.layers import LayerComparison
from miles_tools.verify.verify import Verification

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

GAP_COLUMNS = ("", "tokens", "mean |Δ|", "max |Δ|", "KL k1", "KL k3", "median", "90 %", "99 %", "99.9 %")
PARITY_COLUMNS = ("side", "format", "tensors", "declared", "measured", "values that differ", "worst probe")
LAYER_COLUMNS = ("module", "rows", "differ", "engine's digest", "trainer's digest")
WORST_COLUMNS = ("sample", "token", "text", "engine", "trainer", "Δ", "before", "after")

#: Width of a terminal that has room for any table; used to measure a table's preferred width.
_UNBOUNDED = 10_000

#: Modules that differ in the table of layers; verify.json has all.
_MODULES = 8

#: Columns of words; the others are numbers.
_WORDS = {*PARITY_COLUMNS[:5], PARITY_COLUMNS[6], "", "cause", "text", "before", "after", "module"}


def gap_rows(found: Verification) -> list[tuple[str, ...]]:
    """Return the rows of the gap between engine and trainer, and between decoding and scoring of the engine if measured."""
    columns = [("engine - trainer", found.gap)]
    if found.decoding is not None:
        columns.append(("engine, decoding - scoring", found.decoding))
    return [(label, *_numbers(gap)) for label, gap in columns]


def _numbers(gap: Gap) -> tuple[str, ...]:
    numbers = (gap.mean_abs, gap.max_abs, gap.kl_k1, gap.kl_k3, *gap.quantiles.values())
    return str(gap.tokens), *(f"{n:.3g}" for n in numbers)


def parity_rows(found: Verification) -> list[tuple[str, ...]]:
    """Return the declared parity of each side's quantiser and products, and the results of the probes."""
    products: list[tuple[str, ...]] = [
        (side.backend, side.format, "products", str(side.products[0]), str(side.products[1]), "", "")
        for side in found.parity
        if side.products is not None
    ]
    return products + [
        (
            *(side.backend, side.format, what, str(declared), str(measured.parity)),
            f"{measured.differing:.2%}",
            measured.probe if measured.differing else "",
        )
        for side in found.parity
        for what, declared, measured in zip(TENSORS, side.declared, side.measured, strict=True)
    ]


def worst_rows(gap: Gap) -> list[tuple[str, ...]]:
    """Return the tokens with the largest differences, with their context."""
    return [
        (
            *(str(t.sample), str(t.position), repr(t.text)),
            *(f"{t.engine:.4f}", f"{t.trainer:.4f}", f"{t.delta:+.4f}"),
            *(repr(t.before), repr(t.after)),
        )
        for t in gap.worst
    ]


def sections(found: Verification) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield (title, columns, rows) of every table."""
    yield "Log-probs of the same tokens on both sides, nats", GAP_COLUMNS, gap_rows(found)
    if found.parity:
        probes = dict.fromkeys(name for side in found.parity for name in side.probes)
        yield f"Quantisers against the format, on the probes: {', '.join(probes)}", PARITY_COLUMNS, parity_rows(found)
    if found.budget is not None:
        yield "Mismatch budget", BUDGET_COLUMNS, budget_rows(found.budget.to_dict())
    if found.layers is not None:
        yield "Output rows of layers, and of the first modules that differ", LAYER_COLUMNS, layer_rows(found.layers)
    yield "Worst tokens", WORST_COLUMNS, worst_rows(found.gap)


def layer_rows(found: LayerComparison) -> list[tuple[str, ...]]:
    """Return the rows of the layers and of the first modules whose outputs differ, in the order of computation."""
    differing = [module for module in found.modules if module.differing][:_MODULES]
    chosen = [m for m in found.modules if m in differing or m.name.rpartition(".")[2].isdigit() or "." not in m.name]
    return [(m.name, str(m.rows), str(m.differing), m.engine, m.trainer) for m in chosen]


def verdict(found: Verification) -> str:
    """One sentence; for a running server, one more for each cause."""
    if found.layers is not None:
        return f"{found.policy}: {_verdict_of_layers(found, found.layers)}"
    if found.findings is not None:
        return "\n".join([_verdict_of_server(found), *(f"{i}. {text}" for i, text in enumerate(found.findings, 1))])
    relation = "within" if found.ok else "beyond"
    return (
        f"{found.policy}: mean |Δ log p| {found.gap.mean_abs:.3g} over {found.gap.tokens} tokens is {relation} the "
        f"tolerance of {found.tolerance:g} (--verify-logprobs-tolerance)"
    )


def _verdict_of_server(found: Verification) -> str:
    causes = len(found.findings or ())
    result = f"{causes} cause{'s' * (causes > 1)} beyond rounding:" if causes else "no cause beyond rounding"
    return f"{found.policy}: mean |Δ log p| {found.gap.mean_abs:.3g} over {found.gap.tokens} tokens; {result}"


def _verdict_of_layers(found: Verification, layers: LayerComparison) -> str:
    first, tokens = layers.first, f"max |Δ log p| {found.gap.max_abs:.3g} over {found.gap.tokens} tokens"
    if first is not None:
        return (
            f"{first.name} is the first module whose outputs differ, in {first.differing} of {first.rows} rows ({tokens}); "
            "--plugins true_on_policy makes both sides compute the same bits"
        )
    if found.gap.max_abs:
        return f"the outputs of all {len(layers.modules)} modules are bit-identical, and the log-probs computed from them are not ({tokens})"
    return f"the outputs of all {len(layers.modules)} modules are bit-identical on both sides ({tokens})"


def tables(found: Verification, console: Console) -> Iterator[RenderableType]:
    """Yield the sections as terminal tables; a table wider than the terminal becomes a list, to avoid broken words."""
    from rich import box
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    for title, columns, rows in sections(found):
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
        for column in columns:
            table.add_column(column, justify="left" if column in _WORDS else "right")
        for row in rows:
            table.add_row(*map(Text, row))  # decoded text is no markup
        if console.measure(table, options=console.options.update_width(_UNBOUNDED)).maximum <= console.width:
            yield table
            continue
        items = [", ".join(f"{c} {v}".strip() for c, v in zip(columns, row, strict=True) if v) for row in rows]
        yield Group(Text(title, style="bold"), *(Padding(Text(item), (0, 0, 0, 2)) for item in items), "")


def write_page(directory: Path, every: Sequence[Verification], title: str, command: str) -> Path:
    """Write ``verify.html``, ``verify.json`` and the plots as PNG files; returns the page's path."""
    from jinja2 import Environment, PackageLoader

    make_folder(directory)
    parts = []
    for found in every:
        images = {"gap": draw_gap(found.engine, found.trainer, found.tolerance)}
        if found.budget is not None:
            images["budget"] = draw_budget(found.budget.to_dict())
        stem = "" if len(every) == 1 else f"{found.policy}_"
        for name, png in images.items():
            write_file(directory / f"{stem}{name}.png", png)
        parts.append(
            {
                "verdict": verdict(found),
                "ok": found.ok,
                "images": ["data:image/png;base64," + base64.b64encode(png).decode() for png in images.values()],
                "tables": list(sections(found)),
            }
        )
    content = [found.to_dict() for found in every]
    write_file(directory / "verify.json", json.dumps(content, indent=1) + "\n")
    template = Environment(loader=PackageLoader("miles_tools.verify", ""), autoescape=True).get_template("verify.html")
    page = directory / "verify.html"
    made = time.strftime("%Y-%m-%d %H:%M")
    write_file(page, template.render(title=title, parts=parts, command=command, version=__version__, made=made))
    return page
