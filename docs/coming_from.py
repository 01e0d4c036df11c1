"""The page for users of other programs, written from ``elsewhere.toml``: ``python docs/coming_from.py > docs/coming-from.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from miles_core.config.elsewhere import about, others

INTRODUCTION = """# Coming from TRL, verl, slime or miles

Written by `python docs/coming_from.py`; do not edit. The command line knows these tables too: a name of another program is
answered with the one here.

What is different everywhere: a run is refused before anything is built, with every reason at once (`--dry-run`). One seed determines
everything random. Log-probabilities are those of the distribution that was sampled, temperature, top-k and top-p included. Normalisers are
taken over the whole optimiser step. [Where others differ](algorithms.md#where-others-differ) has the formulas."""


#: Recipes of other programs and what they are here, in Markdown.
RECIPES = Path(__file__).parents[1] / "recipes" / "qwen3-30b-a3b-one-node.md"


def page() -> str:
    """The Markdown page: recipes, then one table per program."""
    parts = [INTRODUCTION, RECIPES.read_text(encoding="utf-8").strip()]
    for program, names in others().items():
        rows = "\n".join(f"| `{theirs}` | {_marked(here)} |" for theirs, here in names.items())
        parts.append(f"## {program}\n\n{about(program)}\n\n| there | here |\n|---|---|\n{rows}")
    return "\n\n".join(parts) + "\n"


def _marked(here: str) -> str:
    """Flags, and what follows them in capitals, as code."""
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
