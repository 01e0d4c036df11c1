"""Model families in the embedded backend, compared with Transformers: the table of ``docs/families.md``.

Run: ``python benchmarks/mismatch/families.py --write`` (a minute). Every family is a tiny random checkpoint in FP32: packed scores, greedy
generation, gradients and export (``miles_embedded.testing.comparison``); for mixtures of experts also the gap of a trainer that
replays the engine's experts (r3); and for each number format an export that went through it, against Transformers with the same
weights. Plugins are those that are installed here. The last line of the output is one JSON object; the exit code is 1 when a number
is out of bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import ROOT, commit, installed
from benchmarks.mismatch import backends
from miles_core.contracts.engine import Request, Sampling
from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.errors import MilesError
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.manifest import REFUSED
from miles_embedded.model.experts import routed_blocks
from miles_embedded.model.export import export_checkpoint
from miles_embedded.model.load import load_model
from miles_embedded.model.load_units import load_units
from miles_embedded.model.parts import configuration
from miles_embedded.model.views import export, views
from miles_embedded.testing.comparison import compare, score_gap
from miles_embedded.testing.families import FAMILIES, family_checkpoint
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_formats.codec import FormatCodec
from miles_formats.fused_experts import Family
from miles_fp8.format import Fp8
from miles_int4.format import Int4
from miles_mxfp8.format import Mxfp8
from miles_nvfp4.format import Nvfp4
from miles_r3 import ROUTES
from miles_r3.embedded import RECORDED, REPLAY, tap
from miles_r3.hooks import routes_of_rows

PAGE = ROOT / "docs" / "families.md"
FORMATS = {"fp8": Fp8, "mxfp8": Mxfp8, "int4": lambda: Int4(group_size=16), "nvfp4": Nvfp4}
#: Largest differences that FP32 explains: nats, and parts of a gradient's largest entry.
BOUNDS = {"score": 2e-5, "greedy": 2e-5, "gradient": 1e-3, "r3": 2e-5}


def replayed(checkpoint: Path) -> float | str:
    """Largest gap, in nats, of a trainer that replays what the engine chose; a dash without a router."""
    model = load_model(checkpoint, "float32")
    if not routed_blocks(model):
        return "-"
    try:
        tap(model)
    except MilesError:
        return "refused"
    engine = EmbeddedEngine(model, Settings(str, eos=[], max_context=64))
    requests = [Request([3 + i, 4, 5], Sampling(9 + i, ignore_eos=True), key=i, extras={ROUTES.name}) for i in range(3)]

    async def main() -> list[Any]:
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    samples = []
    for i, (request, response) in enumerate(zip(requests, asyncio.run(main()), strict=True)):
        samples.append(Sample(tokens=request.tokens + response.tokens, response_length=len(response.tokens), index=i))
        samples[-1].rollout_log_probs = response.log_probs
        samples[-1].fields[ROUTES.name] = response.extras[ROUTES.name]
    other = load_model(checkpoint, "float32")
    tap(other)
    trainer = EmbeddedTrainer(other, TrainerConfig(OptimizerConfig()))
    trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
    batch = collate(samples, [ROUTES])
    micro, ctx = trainer.prepare(batch, list(range(len(batch))), "train", False)
    ctx.attached[REPLAY], ctx.attached[RECORDED] = routes_of_rows(micro.columns[ROUTES.name], ctx.rows)
    found = trainer.forward(other, micro, ctx).log_probs.detach()
    return float((found - micro.columns["rollout_log_probs"])[micro.mask != 0].abs().max())


def stored(checkpoint: Path) -> Iterator[str]:
    """Formats whose weights the engine takes from the trainer's export, and computes with as Transformers does."""
    for name, make in FORMATS.items():
        model = load_model(checkpoint, "float32")
        codec = FormatCodec(make())
        try:
            codec.settle({v.name: v.size for v in views(model)}, Family.of(configuration(model).to_dict()))
            load_units(model, codec.encode(export(model)), codec.decode)
        except MilesError:
            continue  # sizes that the format does not divide, or nothing that it is for
        with tempfile.TemporaryDirectory() as there:
            export_checkpoint(model, None, Path(there) / "stored")
            if score_gap(Path(there) / "stored") < BOUNDS["score"]:
                yield name


def row(family: str, directory: Path, device: str) -> dict[str, Any]:
    """Everything about one family; on a GPU without r3 and formats."""
    checkpoint = family_checkpoint(family, directory)
    found = compare(checkpoint, device=device)
    return {
        "score": found.score,
        "greedy": found.greedy,
        "gradient": found.gradient,
        "export": found.export,
        "r3": replayed(checkpoint) if device == "cpu" else "-",
        "formats": list(stored(checkpoint)) if device == "cpu" else [],
    }


def page(rows: dict[str, dict[str, Any]]) -> str:
    """``docs/families.md``."""

    def cells(found: dict[str, Any]) -> str:
        numbers = [x if isinstance(x := found[n], str) else f"{x:.0e}" for n in BOUNDS]
        return " | ".join(
            [*numbers[:3], "equal" if found["export"] else "differs", numbers[3], ", ".join(found["formats"])]
        )

    return text_around([f"| {family} | {cells(found)} |" for family, found in rows.items()])


def text_around(lines: list[str]) -> str:
    """``docs/families.md`` with these lines in its first table."""
    refused = [f"- {', '.join(f'`{t}`' for t in sorted(types))}: {why}." for why, types in REFUSED.items()]
    text = Path(__file__).with_name("families.md").read_text(encoding="utf-8")
    return (
        text.replace("<!-- table -->", "\n".join(lines))
        .replace("<!-- refused -->", "\n".join(refused))
        .replace("<!-- backends -->", backends.section(json.loads(backends.RESULT.read_text(encoding="utf-8"))))
        .replace("<!-- every -->", everything_installed())
    )


def write_text() -> None:
    """Write ``docs/families.md`` with the numbers that it has."""
    rest = PAGE.read_text(encoding="utf-8").partition("|---|")[2].splitlines()[1:]
    PAGE.write_text(text_around(list(itertools.takewhile(lambda line: line.startswith("| "), rest))), encoding="utf-8")


def everything_installed() -> str:
    """The section of ``docs/families.md`` about every class of the installed Transformers, from the result of ``every_family.py``."""
    result = json.loads((ROOT / "benchmarks" / "results" / "every_family.json").read_text(encoding="utf-8"))
    by_outcome: dict[str, list[str]] = {}
    for kind, entry in result["families"].items():
        by_outcome.setdefault(entry["outcome"], []).append(f"`{kind}`")
    partly = (
        ""
        if result.get("complete", True)
        else f" The run stopped after {len(result['families'])} types, in alphabetical order."
    )
    reasons: dict[str, list[str]] = {}
    for kind, entry in result["families"].items():
        if entry["outcome"] == "not tried":
            reasons.setdefault(explain_not_tried(entry["detail"]), []).append(f"`{kind}`")
    lines = [f"Transformers {result['transformers']}, {result['date']}, commit {result['commit']}.{partly}"]
    for outcome in result["counts"]:
        if found := by_outcome.get(outcome):
            listed = f": {', '.join(found)}" if outcome != "not tried" else ", by reason"
            lines.append(f"- **{outcome}**, {len(found)}{listed}.")
    lines += [f"    - {why}: {', '.join(kinds)}." for why, kinds in sorted(reasons.items())]
    return "\n".join([lines[0], "", *lines[1:]])


#: A part of the error that making a tiny model raised -> the reason in words.
NOT_TRIED = {
    "requires the timm library": "its vision tower needs the package timm, which is not installed here",
    "validate_architecture": "the sizes that keep other models tiny contradict its defaults",
}


def explain_not_tried(detail: str) -> str:
    """Why no tiny model could be made of a class's defaults."""
    usual = "its defaults are incomplete: sizes, layer types or rotary entries are missing"
    incomplete = "NoneType" in detail or "rope_theta" in detail
    return usual if incomplete else next((why for part, why in NOT_TRIED.items() if part in detail), usual)


def main() -> None:
    """The table, and whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/families.md")
    parser.add_argument("--text", action="store_true", help="write docs/families.md with the numbers that it has")
    parser.add_argument("--device", default="cpu", help="of engine and trainer; not with --write")
    parser.add_argument("families", nargs="*", help="only these")
    options = parser.parse_args()
    if options.text:
        write_text()
        return
    if options.write and options.device != "cpu":
        parser.error("the page has the numbers of a CPU: give --write without --device")
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, family in enumerate(options.families or FAMILIES):
            rows[family] = row(family, Path(directory) / str(number), options.device)
            print(f"{family:24s} {json.dumps(rows[family])}", flush=True)
    if options.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    bad = [
        f
        for f, x in rows.items()
        if not x["export"] or any(not isinstance(x[n], str) and x[n] > b for n, b in BOUNDS.items())
    ]
    print(json.dumps({"families": rows, "bad": bad, "commit": commit(), **installed("torch", "transformers")}))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
