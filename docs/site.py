"""Hooks for MkDocs: READMEs of plugins become pages with a place in the navigation, links into the repository work or are plain text, and the search
ranks what users look for above reference and history.

Pages are written so that their links work where the repository is browsed.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
#: file of the repository -> page of the site, of what lies outside of docs/.
OUTSIDE = {
    **{f"plugins/{p.parent.name}/README.md": f"plugins/{p.parent.name}.md" for p in ROOT.glob("plugins/*/README.md")},
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
#: Weight of a page in the search, by the start of its path; other pages have 1. Pages that answer "how do I ..." come first.
BOOSTS = {
    "checkpoints": 4.0,
    "rewards-and-tools": 4.0,
    "configuration": 2.0,
    "tutorial": 2.0,
    "quick-start": 2.0,
    "data": 2.0,
    "troubleshooting": 2.0,
    "plugins/": 0.5,
    "flags": 0.5,
    "benchmarks": 0.1,
    "decisions/": 0.1,
    "api": 0.1,
    "changelog": 0.05,
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_MODULE = re.compile(r"^::: (\S+)\n", re.MULTILINE)
_SIGNATURES = re.compile(r"<!-- names: .*?<!-- /names -->\n\n?", re.DOTALL)
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Adds the pages of plugins and of the project to the navigation, before the decisions."""
    at = next(number for number, entry in enumerate(config["nav"]) if "Decisions" in entry)
    config["nav"][at:at] = [{"Plugins": plugin_pages()}]
    config["nav"].append(
        {
            "Project": [
                {"Contributing": "contributing.md"},
                {"Changelog": "changelog.md"},
                {"Benchmarks": "benchmarks.md"},
            ]
        }
    )
    return config


def plugin_pages() -> list[dict[str, str]]:
    """Name and page of every plugin with a README."""
    return [{Path(page).stem: page} for page in sorted(OUTSIDE.values()) if page.startswith("plugins/")]


def boost(page: str) -> float:
    """The weight of a page (its path in the site) in the search."""
    return next((weight for start, weight in BOOSTS.items() if page.startswith(start)), 1.0)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside of docs/."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links between files of the repository into links between pages."""
    here = page.file.src_uri
    page.meta["search"] = {"boost": boost(here)}
    source = next((s for s, p in OUTSIDE.items() if p == here), f"docs/{here}")
    markdown = _SIGNATURES.sub("", markdown)  # mkdocstrings shows them
    markdown = _MODULE.sub(lambda match: with_members(match[1]), markdown)
    parts = _CODE.split(markdown)
    return "".join(part if n % 2 else _LINK.sub(lambda m: _link(m, source, here), part) for n, part in enumerate(parts))


def with_members(module: str) -> str:
    """The directive that documents a module; with the names that it exports, if its source does not list them."""
    file = ROOT.joinpath(*module.split("."))
    source = file.with_suffix(".py") if file.with_suffix(".py").is_file() else file / "__init__.py"
    if "__all__ = __dir__()" not in source.read_text(encoding="utf-8"):
        return f"::: {module}\n"
    if str(ROOT) not in sys.path:  # the environment of the site has no miles-core
        sys.path.insert(0, str(ROOT))
    return f"::: {module}\n    options:\n      members: {import_module(module).__all__}\n"


def _link(match: re.Match[str], source: str, here: str) -> str:
    mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
    file = os.path.normpath(PurePosixPath(source).parent / target)
    if file == "docs/decisions":
        file = "docs/decisions/0001-hooks-at-build-time.md"
    page = OUTSIDE.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else "")
    if not page:
        return f"{text} (`{file}`)"
    return f"{mark}[{text}]({os.path.relpath(page, PurePosixPath(here).parent)}{anchor})"
