"""No link of a page is broken: the file is there, and the heading too; every page of the site is found from its navigation."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md", "examples/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(text):
    """(file, anchor) of every link to another place of the repository."""
    for target in LINK.findall(FENCE.sub("", text)):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


def slug(heading):
    """The anchor of a heading, as GitHub and MkDocs make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text))


@cache
def anchors(page):
    return {slug(h) for h in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)}


def broken(path, text):
    """What is wrong with the links of a page."""
    for file, anchor in links(text):
        page = (path.parent / file).resolve() if file else path
        if not page.exists():
            yield f"{file} does not exist"
        elif anchor and anchor not in anchors(page):
            yield f"{file} has no heading #{anchor}"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(path):
    assert list(broken(path, path.read_text(encoding="utf-8"))) == []


def test_a_broken_link_is_found():
    text = "[a](data.md) [b](data.md#prompts) [c](gone.md) [d](data.md#gone) [e](https://x.org/y)\n```text\n[f](g.md)\n```\n"
    assert list(broken(ROOT / "docs" / "page.md", text)) == ["gone.md does not exist", "data.md has no heading #gone"]
    assert slug("Several ranks of the `embedded` trainer, now") == "several-ranks-of-the-embedded-trainer-now"


def entries(nav):
    for item in nav:
        for value in item.values() if isinstance(item, dict) else [item]:
            yield from entries(value) if isinstance(value, list) else [value]


def test_the_navigation_names_pages_and_every_page_is_reached():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = {(ROOT / "docs" / page).resolve() for page in entries(site["nav"])}
    assert [page for page in named if not page.is_file()] == []
    linked = {
        (path.parent / file).resolve() for path in PAGES for file, _ in links(path.read_text(encoding="utf-8")) if file
    }
    assert [p.name for p in (ROOT / "docs").glob("**/*.md") if p.resolve() not in named | linked] == []


def test_the_navigation_lists_every_plugin_and_the_index_links_to_it():
    site = runpy.run_path(str(ROOT / "docs" / "site.py"))
    config = site["on_config"](yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/README.md")}
    assert {f"plugins/{name}.md" for name in plugins} <= set(entries(config["nav"])) and "contributing.md" in entries(
        config["nav"]
    )
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [name for name in plugins if f"(../plugins/{name}/README.md)" not in index] == []


def test_the_api_pages_document_names_that_are_looked_up_late():
    """A parser finds none of them in the source of ``miles_core.plugin``."""
    with_members = runpy.run_path(str(ROOT / "docs" / "site.py"))["with_members"]
    assert "members: ['Capability', " in with_members(
        "miles_core.plugin"
    ) and "'GenerationClient', 'Hint'" in with_members("miles_core.plugin")
    assert "'format_plugin'" in with_members("miles_formats")


def test_the_search_ranks_pages_for_users_first():
    boost = runpy.run_path(str(ROOT / "docs" / "site.py"))["boost"]
    assert (
        boost("checkpoints.md")
        > boost("families.md")
        > boost("decisions/0004-checkpoint-layouts.md")
        >= boost("api.md")
    )


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("resume", "checkpoints"),
        ("seed", "configuration"),
        ("checkpoint", "checkpoints"),
        ("reward", "rewards-and-tools"),
        ("tools", "rewards-and-tools"),
    ],
)
def test_the_page_for_a_word_wins_the_search(word, page):
    """The site's search (lunr) counts a word in a heading 1,000 times a word in the text, times the weight of the page."""
    boost = runpy.run_path(str(ROOT / "docs" / "site.py"))["boost"]
    weights = {}
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").as_posix()
        if any(re.search(rf"\b{word}", heading, re.IGNORECASE) for heading in headings(path)):
            weights[name] = boost(name)
    assert max(weights, key=weights.__getitem__) == f"{page}.md", weights


def headings(page):
    return re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
