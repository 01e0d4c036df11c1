"""How many typical mistakes of plugin authors are answered with plugin, hook and value.

Run: ``python benchmarks/mistakes.py --save`` (under a minute on a quiet machine). Each mistake of ``tests/plugin/mistakes.py`` is a plugin of one
file; a toy run with it must end with an error that names all three. The last line of the output is one JSON
object; the exit code is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import ROOT, finish, installed

from miles_testing import toy_run

CATALOGUE = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "plugin" / "mistakes.py"))


def answer(mistake: Any, folder: Path) -> str:
    """The error that a toy run with this mistake ends with, its notes included, without folders of this machine; "" when it ends well."""
    file = folder / "mine.py"
    file.write_text(CATALOGUE["HEAD"] + mistake.code)
    try:
        toy_run([str(file)], folder / "run", **mistake.flags(folder))
    except Exception as error:  # whatever a user would see
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return text.replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/mistakes-DATE.json")
    save = parser.parse_args().save
    torch.set_num_threads(1)
    found = []
    for mistake in CATALOGUE["MISTAKES"]:
        with tempfile.TemporaryDirectory() as name:
            text = answer(mistake, Path(name))
        right = "plugin mine" in text and mistake.hook in text and mistake.value in text
        found.append({"mistake": mistake.name, "named": right, "answer": text[:300]})
        print(f"{'ok' if right else 'MISSED':7}{mistake.name}: {text[:200]!r}", file=sys.stderr, flush=True)
    named = sum(entry["named"] for entry in found)
    result = {"named": named, "mistakes": len(found), "answers": found}
    finish("mistakes", result, save, lambda: installed("torch", "transformers", "pluggy"))
    sys.exit(named < len(found))


if __name__ == "__main__":
    main()
