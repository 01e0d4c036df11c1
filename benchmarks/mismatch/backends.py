"""Which backend runs which family, as the plan answers: the section "Backends" of ``docs/families.md``.

Run: ``python -m benchmarks.mismatch.backends --write`` (a minute), then ``python -m benchmarks.mismatch.families --text``. Every family is a
tiny random checkpoint, planned on a machine with eight GPUs and every package: with the embedded engine and trainer, with SGLang as the engine,
and with Megatron-Core as the trainer; families that read images also with ``--media``. A plan says what is refused and why;
``docs/families.md`` compares numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, commit
from miles_core.errors import PlanError
from miles_embedded.manifest import IMAGES, UNLIMITED
from miles_embedded.testing.families import FAMILIES, family_checkpoint
from miles_embedded.testing.images import IMAGE_PARTS, vision_checkpoint
from miles_testing import plan

RESULT = ROOT / "benchmarks" / "results" / "backends.json"
MACHINE = ["gpu.count=8", "gpu.memory_gb=140", "package.sglang=0.5.17", "package.megatron-core=0.19.2"]
#: The part of a reason that names a family.
_KIND = re.compile(r"model_type \w+ of config.json")
#: Column -> options of the plan.
BACKENDS: dict[str, dict[str, Any]] = {
    "embedded": {"engine": "embedded", "trainer": "embedded"},
    "SGLang": {"engine": "sglang", "trainer": "embedded"},
    "Megatron": {"engine": "embedded", "trainer": "megatron"},
}


def ask(checkpoint: Path, family: str, **options: Any) -> str:
    """Return why the plan refuses a run; "" if it accepts it."""
    limit = {"rollout_max_context_len": 64} if family in UNLIMITED else {}
    try:
        plan([], MACHINE, hf_checkpoint=checkpoint, **limit, **options)
    except PlanError as error:
        return "; ".join(_KIND.sub("this family", problem.because) for problem in error.problems)
    return ""


def answers(family: str, directory: Path) -> dict[str, str]:
    """Return the plan's answer for every backend, and with images for those that read them."""
    kinds = (False, True) if family in IMAGE_PARTS else (False,)
    checkpoint = (vision_checkpoint if family in IMAGE_PARTS else family_checkpoint)(family, directory)
    found: dict[str, str] = {}
    for images in kinds:
        more = {"media": True, "apply_chat_template": True} if images else {}
        for name, options in BACKENDS.items():
            text = found.get(name, "")
            found[name + " with images" * images] = text or ask(checkpoint, family, **options, **more)
    return found


def section(result: Mapping[str, Any]) -> str:
    """Return the table and the reasons below it."""
    reasons: dict[str, int] = {}

    def cell(answer: str | None) -> str:
        if answer is None:
            return "-"
        return f"({reasons.setdefault(answer, len(reasons) + 1)})" if answer else "yes"

    columns = [*BACKENDS, *(f"{name} with images" for name in BACKENDS)]
    lines = [f"| family | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for family, found in result["families"].items():
        lines.append(f"| {family} | {' | '.join(cell(found.get(column)) for column in columns)} |")
    lines += ["", *(f"{number}. {reason[:1].upper()}{reason[1:]}." for reason, number in reasons.items())]
    return "\n".join([f"Plans of {result['date']}, commit {result['commit']}.", "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write the result; families.py --text then writes the page"
    )
    parser.add_argument("families", nargs="*", help="only these")
    given = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, family in enumerate(given.families or dict.fromkeys([*FAMILIES, *IMAGES])):
            found[family] = answers(family, Path(directory) / str(number))
            print(family, json.dumps(found[family]), flush=True)
    result = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "families": found}
    if given.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
