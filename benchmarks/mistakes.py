"""How many typical mistakes of plugin authors are answered with plugin, hook and value.

Run: ``python benchmarks/mistakes.py`` (under a minute on a quiet machine). Each mistake of ``tests/plugin/mistakes.py`` is a plugin of one
file; a toy run with it must end with an error that names all three. The last line of the output is one JSON object.
"""

from __future__ import annotations

import json
import platform
import runpy
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from miles_testing import toy_run

CATALOGUE = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "plugin" / "mistakes.py"))


def answer(mistake: Any, folder: Path) -> str:
    """The error that a toy run with this mistake ends with, its notes included; "" when it ends well."""
    file = folder / "mine.py"
    file.write_text(CATALOGUE["HEAD"] + mistake.code)
    try:
        toy_run([str(file)], folder / "run", **mistake.options)
    except Exception as error:  # whatever a user would see
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ""


def main() -> None:
    found = []
    for mistake in CATALOGUE["MISTAKES"]:
        with tempfile.TemporaryDirectory() as name:
            text = answer(mistake, Path(name))
        right = "plugin mine" in text and mistake.hook in text and mistake.value in text
        found.append({"mistake": mistake.name, "named": right, "answer": text[:300]})
        print(f"{'ok' if right else 'MISSED':7}{mistake.name}: {text[:200]!r}", flush=True)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "benchmark": "mistakes",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": git.stdout.strip() or "unknown",
        "command": "python benchmarks/mistakes.py",
        "python": platform.python_version(),
        "named": sum(entry["named"] for entry in found),
        "mistakes": len(found),
        "answers": found,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
