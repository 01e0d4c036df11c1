"""Every configuration class of the installed Transformers that generates text, in the embedded backend.

Run: ``python benchmarks/every_family.py --write`` (five minutes on an idle core). A tiny random model is made of each class's defaults
(``miles_embedded.testing.tiny_configuration``) and goes the way of a run: the plan reads its ``config.json`` and the headers of its weights,
then engine and trainer are compared with Transformers' own code. The outcome is one of

- ``exact``: scores, greedy generation, gradients and export are those of Transformers;
- ``refused``: the plan refuses it, with the reason;
- ``late``: the plan accepts it, and it fails afterwards;
- ``wrong``: it runs, and computes something else;
- ``not tried``: no tiny model could be made of the defaults; the plan does not refuse it, and the self-check of the engine decides.

The result file is ``benchmarks/results/every_family.json``; ``benchmarks/families.py --write`` puts it into ``docs/families.md``. The exit code is 1
when a family is late or wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from measure import ROOT, commit, installed
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from miles_core.plugin import Facts
from miles_core.plugin.detect import config_facts
from miles_core.plugin.model_config import model_config
from miles_embedded.manifest import review
from miles_embedded.model.examine import examine_checkpoint
from miles_embedded.testing.families import FAMILIES, compare, family_checkpoint
from miles_embedded.testing.tiny_configuration import tiny_configuration
from miles_testing import tiny

RESULT = ROOT / "benchmarks" / "results" / "every_family.json"
#: Seconds after which a family counts as late.
_PATIENCE = 300


def judge(kind: str, directory: Path) -> tuple[str, str]:
    """The outcome of one model type, and what there is to say about it."""
    if found := refusal({"model_type": kind}):
        return "refused", found
    try:
        if kind in FAMILIES:
            checkpoint = family_checkpoint(kind, directory)
        else:
            checkpoint = tiny.random_checkpoint(tiny_configuration(CONFIG_MAPPING[kind]), directory)
    except Exception as error:
        return "not tried", brief(error)
    try:
        if found := refusal(model_config(str(checkpoint)) or {}):
            return "refused", found
        examine_checkpoint(checkpoint)
    except Exception as error:
        return "refused", brief(error).replace(f"--hf-checkpoint {checkpoint}: ", "")
    try:
        found = compare(checkpoint)
    except Exception as error:
        return "late", brief(error)
    exact = found.score < 3e-5 and found.greedy < 3e-5 and found.gradient < 1e-3 and found.export
    numbers = f"score {found.score:.0e}, greedy {found.greedy:.0e}, gradient {found.gradient:.0e}"
    return ("exact" if exact else "wrong"), numbers + ("" if found.export else ", the export differs")


def refusal(config: dict[str, Any]) -> str:
    """Why the plan refuses this ``config.json``; empty where it does not."""
    problems = review(Facts(config_facts(config)), config).problems
    return problems[0].because if problems else ""


def brief(error: Exception) -> str:
    """The first line of an error, without addresses."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*/', '', first)[:200]}"


def _expire(*args: object) -> None:
    raise TimeoutError(f"not done after {_PATIENCE} seconds")


def main() -> None:
    """Judge every type, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/every_family.json")
    parser.add_argument("types", nargs="*", help="only these model types; with --write the others keep their outcome")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _expire)
    known = json.loads(RESULT.read_text())["families"] if options.types and RESULT.is_file() else {}
    every = options.types or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
    for kind in every:
        with tempfile.TemporaryDirectory() as directory:
            signal.alarm(_PATIENCE)
            try:
                outcome, detail = judge(kind, Path(directory) / "model")
            except TimeoutError as error:
                outcome, detail = "late", brief(error)
            finally:
                signal.alarm(0)
        known[kind] = {"outcome": outcome, "detail": detail}
        print(f"{kind:24s} {outcome:9s} {detail}", flush=True)
    outcomes = [entry["outcome"] for entry in known.values()]
    counts = {name: outcomes.count(name) for name in ("exact", "refused", "late", "wrong", "not tried")}
    result = {"counts": counts, "date": datetime.now(UTC).date().isoformat(), "commit": commit(),
              **installed("torch", "transformers"), "families": dict(sorted(known.items()))}  # fmt: skip
    if options.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(counts))
    sys.exit(bool(counts["late"] or counts["wrong"]))


if __name__ == "__main__":
    main()
