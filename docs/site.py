"""What the site adds to the pages, for MkDocs: READMEs of plugins become pages, and links into the repository work or are plain text.

Pages are written so that their links work where the repository is browsed.
"""

from __future__ import annotations

import os
import re
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
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside of docs/."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links between files of the repository into links between pages."""
    here = page.file.src_uri
    source = next((s for s, p in OUTSIDE.items() if p == here), f"docs/{here}")
    parts = _CODE.split(markdown)
    return "".join(part if n % 2 else _LINK.sub(lambda m: _link(m, source, here), part) for n, part in enumerate(parts))


def _link(match: re.Match[str], source: str, here: str) -> str:
    mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
    file = os.path.normpath(PurePosixPath(source).parent / target)
    if file == "docs/decisions":
        file = "docs/decisions/0001-hooks-at-build-time.md"
    page = OUTSIDE.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else "")
    if not page:
        return f"{text} (`{file}`)"
    return f"{mark}[{text}]({os.path.relpath(page, PurePosixPath(here).parent)}{anchor})"
