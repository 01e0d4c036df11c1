"""Scripts in folders by subject: the README names each of them, and they import each other without circles."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = {
    ".".join(path.relative_to(BENCHMARKS.parent).with_suffix("").parts): path for path in BENCHMARKS.glob("*/*.py")
}


def test_the_readme_names_every_script_in_the_row_of_its_folder():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", (BENCHMARKS / "README.md").read_text(encoding="utf-8"), re.M)
    named = {f"benchmarks.{folder}.{name}" for folder, text in rows for name in re.findall(r"`(\w+)`", text)}
    assert named == set(SCRIPTS)


def imported(path: Path) -> set[str]:
    """Return the scripts that a script imports, also inside functions."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.ImportFrom)]
    names = {name for n in nodes for name in (n.module, *(f"{n.module}.{alias.name}" for alias in n.names))}
    return names & set(SCRIPTS)


def test_scripts_import_each_other_without_circles():
    order = TopologicalSorter({name: imported(path) for name, path in SCRIPTS.items()})
    assert set(order.static_order()) == set(SCRIPTS)
