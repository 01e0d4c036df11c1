"""Every configuration class of the installed Transformers that generates text, in the embedded backend.

Run: ``python benchmarks/mismatch/every_family.py --write`` (a quarter of an hour on an idle core; ``--workers 12`` on many cores), or with
``--log FILE`` in several sittings. A tiny random model is made of each class's defaults (``miles_embedded.testing.tiny_configuration``) and
goes the way of a run: the plan reads its ``config.json`` and the headers of its weights, then engine and trainer are compared with
Transformers' own code. The outcome is one of

- ``exact``: scores, greedy generation, gradients and export are those of Transformers;
- ``refused``: the plan refuses it, with the reason (a class without a tiny model is examined with its default sizes, without
  weights);
- ``late``: the plan accepts it, and it fails afterwards;
- ``wrong``: it runs, and computes something else;
- ``not tried``: no tiny model could be made of the defaults; the plan does not refuse it, and the self-check of the engine decides.

The result file is ``benchmarks/results/every_family.json``; ``benchmarks/mismatch/families.py --write`` puts it into
``docs/families.md``. The exit code is 1 when a family is late or wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import signal
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from benchmarks.measure import ROOT, commit, installed
from miles_core.plugin import CheckpointError, Facts
from miles_core.plugin.detect import config_facts
from miles_core.plugin.model_config import model_config
from miles_embedded.manifest import review
from miles_embedded.model.examine import examine_checkpoint
from miles_embedded.testing.comparison import compare
from miles_embedded.testing.families import FAMILIES, family_checkpoint
from miles_embedded.testing.tiny_configuration import tiny_configuration
from miles_testing import tiny

RESULT = ROOT / "benchmarks" / "results" / "every_family.json"
#: Seconds after which a family counts as late.
_PATIENCE = 300
#: Beginnings of errors about entries that a class's defaults leave out. They say nothing about a checkpoint of the type.
_DEFAULTS = ("no model can be made of its config.json", "the forward of", "config.json cannot be used")


def judge(kind: str, directory: Path) -> tuple[str, str]:
    """The outcome of one model type, and what there is to say about it."""
    if why := refusal({"model_type": kind}):
        return "refused", why
    try:
        if kind in FAMILIES:
            checkpoint = family_checkpoint(kind, directory)
        else:
            checkpoint = tiny.random_checkpoint(tiny_configuration(CONFIG_MAPPING[kind]), directory)
    except Exception as error:
        why = refusal_of_defaults(kind, directory.with_name("defaults"))
        return ("refused", why) if why else ("not tried", brief(error))
    try:
        if why := refusal(model_config(str(checkpoint)) or {}):
            return "refused", why
        examine_checkpoint(checkpoint)
    except Exception as error:
        return "refused", brief(error)
    try:
        found = compare(checkpoint)
    except Exception as error:
        return "late", brief(error)
    exact = found.score < 3e-5 and found.greedy < 3e-5 and found.gradient < 1e-3 and found.export
    numbers = f"score {found.score:.0e}, greedy {found.greedy:.0e}, gradient {found.gradient:.0e}"
    return ("exact" if exact else "wrong"), numbers + ("" if found.export else ", the export differs")


def refusal_of_defaults(kind: str, directory: Path) -> str:
    """Why the plan refuses a checkpoint with the default sizes of a class without a tiny model; empty where it does not refuse
    it, or where the defaults make no model at all."""
    try:
        CONFIG_MAPPING[kind]().save_pretrained(directory)
    except Exception:  # the class itself refuses its defaults
        return ""
    if found := refusal(model_config(str(directory)) or {}):
        return found
    try:
        examine_checkpoint(directory, weights=False)
    except CheckpointError as error:
        found = brief(error)
    return "" if any(words in found for words in _DEFAULTS) else found


def refusal(config: dict[str, Any]) -> str:
    """Why the plan refuses this ``config.json``; empty where it does not."""
    problems = review(Facts(config_facts(config)), config).problems
    return problems[0].because if problems else ""


def brief(error: Exception) -> str:
    """The first line of an error, without paths."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    first = re.sub(r"/[^ ]*/", "", re.sub(r"--hf-checkpoint \S+: ", "", first))
    return f"{type(error).__name__}: {first[:200]}"


def judge_within(kind: str) -> tuple[str, dict[str, str]]:
    """``judge`` with a time limit, in a process of its own or not; (type, its entry of the result)."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _expire)
    with tempfile.TemporaryDirectory() as directory:
        signal.alarm(_PATIENCE)
        try:
            outcome, detail = judge(kind, Path(directory) / "model")
        except TimeoutError as error:
            outcome, detail = "late", brief(error)
        finally:
            signal.alarm(0)
    return kind, {"outcome": outcome, "detail": detail}


def _expire(*args: object) -> None:
    raise TimeoutError(f"not done after {_PATIENCE} seconds")


def known_families(log: Path | None, types: list[str]) -> dict[str, Any]:
    """What counts already: of a log, its lines; where only some types are judged, the others of the result file."""
    if log is not None and log.is_file():
        return dict(json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
    return dict(json.loads(RESULT.read_text(encoding="utf-8"))["families"]) if types and RESULT.is_file() else {}


def count_refusals() -> None:
    """Mark types of the result file that the plan has come to refuse by their name; everything else stays as it was measured."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    for kind, entry in result["families"].items():
        if entry["outcome"] != "refused" and (found := refusal({"model_type": kind})):
            entry |= {"outcome": "refused", "detail": found}
    outcomes = [entry["outcome"] for entry in result["families"].values()]
    result["counts"] = {name: outcomes.count(name) for name in result["counts"]}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["counts"]))


def main() -> None:
    """Judge every type, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/every_family.json")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with one thread")
    parser.add_argument(
        "--log", type=Path, help="a JSON line per type as soon as it is judged; types in it count already"
    )
    parser.add_argument(
        "--refusals",
        action="store_true",
        help="judge nothing; count types of the result file that the plan refuses now",
    )
    parser.add_argument("types", nargs="*", help="only these model types; with --write the others keep their outcome")
    options = parser.parse_args()
    if options.refusals:
        count_refusals()
        return
    known = known_families(options.log, options.types)
    every = options.types or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
    left = [kind for kind in every if options.types or kind not in known]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, maxtasksperchild=20) as pool:
        for kind, entry in pool.imap_unordered(judge_within, left):
            known[kind] = entry
            print(f"{kind:24s} {entry['outcome']:9s} {entry['detail']}", flush=True)
            if options.log is not None:
                with options.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([kind, entry]) + "\n")
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
