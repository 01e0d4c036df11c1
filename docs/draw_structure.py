"""Draws ``docs/structure.svg`` and fills the generated parts of ``docs/structure.md``, from the table that
``tests/test_layers.py`` holds the imports against and from the docstrings of the packages::

    python docs/draw_structure.py
"""

from __future__ import annotations

import ast
import re
import runpy
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "structure.md", ROOT / "docs" / "structure.svg"
TABLE = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))

#: Import packages from the top.
ORDER = ("miles_testing", "miles_tools", "miles_embedded", "miles_workers", "miles_formats", "miles_core")
SUBTITLES = {
    "miles_testing": "the test kit for plugin authors",
    "miles_tools": "what a user runs besides training",
    "miles_embedded": "the backend that ships with core, a plugin like any other",
    "miles_workers": "trainer ranks, engines and rollouts in other processes",
    "miles_formats": "number formats: the encoder of weights, and conversion",
}

#: Rows from the top: what imports comes above what is imported.
Rows = list[list[tuple[str, str]]]

WIDTH, MARGIN, GAP, LINE = 1000, 14, 8, 15
#: Most boxes side by side; more are drawn in two rows.
BOXES = 12
CHARACTER = 5.8  # width of one at the small font's size, generously


def docstring(root: str, package: str) -> str:
    """Of a package, of a module that counts as one, or of an import package with one layer."""
    path = ROOT / root if f"miles_{package}" == root else ROOT / root / package
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert found, f"{file} has no docstring"
    return found


def summary(root: str, package: str) -> str:
    """The docstring's first paragraph on one line, without its full stop."""
    first = docstring(root, package).split("\n\n")[0]
    return " ".join(first.split()).removesuffix(".").replace("``", "")


def rows_of(root: str, table: list[dict[str, str]]) -> Rows:
    """(package, summary) of every row, the top one first."""
    return [[(package, summary(root, package)) for package in row] for row in reversed(table)]


def label(root: str, package: str) -> str:
    """The dotted name of a table's entry."""
    return root if f"miles_{package}" == root else f"{root}.{package}"


def plugins() -> list[str]:
    """The plugins of this repository, by their folders."""
    return sorted(path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml"))


# -- the picture -----------------------------------------------------------------------------------------------------


class Picture:
    """SVG elements from top to bottom; ``y`` is where the next one goes."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.hues: list[int] = []
        self.y = MARGIN

    def text(self, x: float, y: float, words: str, kind: str) -> None:
        """One line of text with its baseline at ``y``."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A rectangle with round corners."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {size} rx="6" class="{kind}"/>')

    def row(self, boxes: list[tuple[str, str]], hue: int, x: float, width: float) -> None:
        """Boxes of one layer side by side, as wide as their words need; one alone has its words beside its name."""
        self.hues.append(hue)
        if len(boxes) == 1:
            self.box(x, self.y, width, 30, f"b h{hue}")
            self.text(x + 10, self.y + 20, boxes[0][0], "name")
            self.text(x + 110, self.y + 20, boxes[0][1], "small")
            self.y += 30 + GAP
            return
        if len(boxes) > BOXES:
            half = -(-len(boxes) // 2)
            self.row(boxes[:half], hue, x, width)
            self.row(boxes[half:], hue, x, width)
            return
        needed = [max(len(name) + 8, len(told) ** 0.7) for name, told in boxes]
        room = width - GAP * (len(boxes) - 1)
        widths = [room * part / sum(needed) for part in needed]
        told = [wrap(text, max(int((w - 20) / CHARACTER), 1)) for (_, text), w in zip(boxes, widths, strict=True)]
        height = 28 + LINE * max(map(len, told))
        for (name, _), lines, wide in zip(boxes, told, widths, strict=True):
            self.box(x, self.y, wide, height, f"b h{hue}")
            self.text(x + 10, self.y + 19, name, "name")
            for number, line in enumerate(lines):
                self.text(x + 10, self.y + 36 + LINE * number, line, "small")
            x += wide + GAP
        self.y += height + GAP

    def frame(self, title: str, told: str, rows: Rows, hues: range) -> None:
        """The rows of one distribution in a frame with a title."""
        top = self.y
        at = len(self.parts)
        self.text(MARGIN + 12, top + 24, title, "title")
        self.text(MARGIN + 12 + 12 * len(title), top + 24, told, "small")
        self.y += 38
        for row, hue in zip(rows, hues, strict=True):
            self.row(row, hue, MARGIN + 12, WIDTH - 2 * MARGIN - 24)
        self.y += 4
        self.parts.insert(
            at,
            f'<rect x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{self.y - top}" rx="10" class="frame"/>',
        )
        self.y += 14

    def svg(self) -> str:
        """The finished picture; colours follow the reader's light or dark mode."""
        hues = dict.fromkeys(self.hues)
        light = "".join(f".h{h}{{fill:hsl({h},55%,95%);stroke:hsl({h},40%,72%)}}" for h in hues)
        dark = "".join(f".h{h}{{fill:hsl({h},28%,17%);stroke:hsl({h},30%,40%)}}" for h in hues)
        style = (
            "text{font-family:ui-sans-serif,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
            ".title{font-size:17px;font-weight:700}.name{font-size:13.5px;font-weight:600}"
            ".small{font-size:12px;fill:#57606a}.frame{fill:#ffffff;stroke:#d0d7de}.ground{fill:#f6f8fa}"
            f".b{{stroke-width:1}}{light}"
            "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9da7b3}"
            f".frame{{fill:#0d1117;stroke:#30363d}}.ground{{fill:#010409}}{dark}}}"
        )
        size = f'viewBox="0 0 {WIDTH} {self.y}" width="{WIDTH}" height="{self.y}"'
        ground = f'<rect width="{WIDTH}" height="{self.y}" rx="12" class="ground"/>'
        title = "<title>The packages of miles-core in layers; each imports from layers below its own only</title>"
        body = "\n".join([ground, *self.parts])
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{title}\n<style>{style}</style>\n{body}\n</svg>\n'


def picture() -> str:
    """The whole repository: plugins on the backend that ships with core, on core."""
    frames: list[tuple[str, str, Rows]] = [
        ("plugins", "one distribution each; they import public modules only", [[(name, "") for name in plugins()]])
    ]
    for root in ORDER:
        public = ", ".join(name for name in TABLE["PUBLIC"] if name.split(".")[0] == root)
        words = f"public: {public}" if root == "miles_core" else SUBTITLES[root]
        frames.append((root, words, rows_of(root, TABLE["TABLES"][root])))
    drawn, hue = Picture(), 300
    for title, words, rows in frames:
        drawn.frame(title, words, rows, range(hue, hue - 9 * len(rows), -9))
        hue -= 9 * len(rows)
    return drawn.svg()


# -- the page --------------------------------------------------------------------------------------------------------


def layer_table() -> str:
    """Every package with what it imports, the top layer first."""
    lines = ["| row | package | imports |", "|--:|---|---|"]
    for root in ORDER:
        for number, row in reversed(list(enumerate(TABLE["TABLES"][root], 1))):
            for index, (package, entry) in enumerate(row.items()):
                listed = re.sub(r"\s*(\w+):\s*", r"; \1: ", entry).strip("; ")
                listed = ", ".join(listed.split()).replace(";,", ";").replace(":,", ":")
                lines.append(f"| {number if not index else ''} | `{label(root, package)}` | {listed or 'nothing'} |")
    return "\n".join(lines)


def paragraphs() -> str:
    """What each package says about itself, the top layer first."""
    blocks = []
    for root in ORDER:
        for row in reversed(TABLE["TABLES"][root]):
            for package in row:
                first, *rest = docstring(root, package).split("\n\n")
                prose = [" ".join(part.split()).replace("``", "`") for part in [first, *rest]]
                blocks.append(f"**`{label(root, package)}`** {' '.join(prose)}")
    return "\n\n".join(blocks)


def page(text: str) -> str:
    """``text`` with its generated parts filled in anew."""
    for name, content in (("layers", layer_table()), ("packages", paragraphs())):
        marked = re.compile(rf"(<!-- {name}: drawn by docs/draw_structure.py -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert marked.search(text), f"{PAGE} has no place for {name}"
        text = marked.sub(lambda m, content=content: f"{m[1]}\n{content}\n\n{m[2]}", text)
    return text


def main() -> None:
    """Write both files."""
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
