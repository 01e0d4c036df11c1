"""Generate the page for users of other programs: ``python docs/coming_from.py > docs/coming-from.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from miles_tools.foreign import programs

INTRODUCTION = """# Coming from TRL, verl, prime-rl, OpenRLHF, slime or miles

Written by `python docs/coming_from.py`; do not edit. The command line uses the same tables: an option of another program
produces an error that names the option to use here, and a command line of another program (with the words that start it, or a
TOML file of prime-rl) one with the complete line.

In a checkout, `python train.py ARGS` is `miles train ARGS`.

Differences from all of these programs: an invalid run is rejected before anything is built, with all reasons at once (`--dry-run`). One
seed determines everything random. Log-probabilities are those of the sampling distribution, including temperature, top-k and top-p.
Normalisers are computed over the whole optimiser step. [Where others differ](algorithms.md#where-others-differ) has the formulas."""


#: A Markdown page that translates recipes of other programs.
RECIPES = Path(__file__).parents[1] / "recipes" / "qwen3-30b-a3b-one-node.md"


def page() -> str:
    """Return the Markdown page: recipes, then one table per program."""
    parts = [INTRODUCTION, RECIPES.read_text(encoding="utf-8").strip()]
    for program in programs():
        rows = "\n".join(f"| `{theirs}` | {_format_flags(here)} |" for theirs, here in program.names.items())
        parts.append(f"## {program.name}\n\n{program.about}\n\n| there | here |\n|---|---|\n{rows}")
    return "\n\n".join(parts) + "\n"


def _format_flags(here: str) -> str:
    """Format flags, and placeholders in capitals that follow them, as code."""
    words: list[str] = []
    for word in here.replace("|", "\\|").split(" "):
        bare = word.rstrip(",;:")
        value = (
            bool(words)
            and words[-1].startswith("`--")
            and words[-1].endswith("`")
            and bare.isupper()
            and len(bare) < 12
        )
        if value or bare.startswith("FILE"):
            words[-1] = f"{words[-1][:-1]} {bare}`{word[len(bare) :]}"
        else:
            words.append(f"`{bare}`{word[len(bare) :]}" if bare.startswith("--") else word)
    return " ".join(words)


if __name__ == "__main__":
    sys.stdout.write(page())
