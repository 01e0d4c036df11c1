"""Write the signatures of the public names into docs/api/*.md, and the names by role into docs/public-names.md: python docs/write_api.py

They are read from the sources, so nothing is imported. The site shows its own rendering of the modules instead (``site.py``). The roles
are in ``roles.toml``.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- names: written by docs/write_api.py -->", "<!-- /names -->"
#: The part of a page between the marks.
BLOCK = re.compile(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}\n\n?", re.DOTALL)
WIDTH = 120
#: Length of a summary from which it ends at its first clause.
LINE = 160
#: Roles, and the roles of modules and names.
ROLES = tomllib.loads((ROOT / "docs" / "roles.toml").read_text(encoding="utf-8"))
NAMES = ROOT / "docs" / "public-names.md"
INTRODUCTION = """# Public names by role

Written by `python docs/write_api.py` from `docs/roles.toml` and the docstrings; do not edit. [The API reference](api.md) has the
signatures, and [hooks](hooks.md) the hooks. Everything that is not on this page may change without notice."""


@cache
def parse(module: str) -> ast.Module:
    """Return the syntax tree of a module or package of the repository."""
    return ast.parse(_path(module).read_text(encoding="utf-8"))


def _path(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


def exports(module: str) -> dict[str, str]:
    """Return public name -> module that defines it, from the imports of a public module and its own definitions."""
    found: dict[str, str] = {}
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0].startswith("miles_"):
            found |= {alias.asname or alias.name: node.module for alias in node.names}
    own = {_name_of(node): module for node in parse(module).body if _name_of(node)}
    listed = _listed(module)
    every = found | own
    return {name: every[name] for name in (listed or sorted(found)) if name in every}


def _listed(module: str) -> list[str]:
    """Return ``__all__`` of a module if it is a list of texts; names of lazy exports are those that it imports for type checkers."""
    for node in parse(module).body:
        if isinstance(node, ast.Assign) and _name_of(node) == "__all__" and isinstance(node.value, ast.List):
            return [str(item.value) for item in node.value.elts if isinstance(item, ast.Constant)]
    lazy = [
        n for n in ast.walk(parse(module)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "make_lazy_exports"
    ]
    if not lazy:
        return []
    table = lazy[0].args[1]
    assert isinstance(table, ast.Dict)
    return sorted(name for value in table.values for name in str(ast.literal_eval(value)).split())


def _name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""


def find(name: str, module: str) -> tuple[ast.stmt | None, str]:
    """Return the definition of a name and its module, through modules that pass the name on; None if there is no definition."""
    for node in parse(module).body:
        if _name_of(node) == name or name in _names_in_tuple(node):
            return node, module
    for inner in ast.walk(parse(module)):
        if isinstance(inner, ast.ImportFrom) and inner.module:
            for alias in inner.names:
                if (alias.asname or alias.name) == name:
                    return find(alias.name, inner.module)
    return None, module


def _names_in_tuple(node: ast.stmt) -> list[str]:
    """Return the names that ``A, B = ...`` assigns."""
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return [ast.unparse(each) for each in target.elts] if isinstance(target, ast.Tuple) else []


def describe(name: str, module: str) -> str:
    """Return the signature of a name and the first paragraph of its docstring, as Markdown."""
    node, _ = find(name, module)
    return _code(name) if node is None else _describe_node(node)


def summarize(name: str, module: str) -> str:
    """Return the first sentence about a name: of its docstring, or of the comment before it."""
    node, home = find(name, module)
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = (ast.get_docstring(node) or "").partition("\n\n")[0]
    else:
        lines = _path(home).read_text(encoding="utf-8").splitlines()[: node.lineno - 1 if node is not None else 0]
        comment: list[str] = []
        while lines and lines[-1].startswith("#:"):
            comment.insert(0, lines.pop().removeprefix("#:").strip())
        text = " ".join(comment)
    sentence = re.split(r"(?<=[.])\s+(?=[A-Z`])", " ".join(text.split()))[0]
    if len(sentence) > LINE:
        sentence = re.split(r"[:;] |, or ", sentence)[0]
    return sentence.replace("``", "`").replace("|", "\\|").rstrip(".:")


def roles_of(name: str, module: str, home: str) -> list[str]:
    """Return the roles that need a name of a public module, which ``home`` defines; empty if the table does not say."""
    if found := ROLES["names"].get(f"{module}:{name}"):
        return list(found)
    parts = home.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((list(ROLES["modules"][each]) for each in above if each in ROLES["modules"]), [])


def names_page() -> str:
    """Return the page with one table of public names per role."""
    rows: dict[str, list[str]] = {role: [] for role in ROLES["roles"]}
    for module in pages():
        for name, home in exports(module).items():
            for role in roles_of(name, module, home):
                rows[role].append(f"| `{name}` | [`{module}`](api/{module}.md) | {summarize(name, home)} |")
    tables = (
        f"## {title}\n\n| name | module | what it is |\n|---|---|---|\n" + "\n".join(rows[role])
        for role, title in ROLES["roles"].items()
    )
    return "\n\n".join([INTRODUCTION, *tables]) + "\n"


def _describe_node(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        return _code("\n".join([_head(node), *(_indent(line) for line in _members(node))])) + _paragraph(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _code(_head(node)) + _paragraph(node)
    text = ast.unparse(node)
    return _code(text if len(text) <= WIDTH else text[: WIDTH - 4] + " ...")


def _members(node: ast.ClassDef) -> list[str]:
    """Return the public attributes and methods of a class, in the order of the source; ``pass`` if there are none."""
    lines = []
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign) and not _name_of(inner).startswith("_"):
            lines.append(ast.unparse(ast.AnnAssign(inner.target, inner.annotation, _short(inner.value), simple=1)))
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(inner.name):
            lines += [f"@{ast.unparse(each)}" for each in inner.decorator_list if ast.unparse(each) == "property"]
            lines.append(_head(inner))
    return lines or ["..."]


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__")


def _short(value: ast.expr | None) -> ast.expr | None:
    """Return a default value, or ``...`` for one that is a call, such as an option's declaration."""
    return ast.Constant(...) if isinstance(value, ast.Call) else value


def _head(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}{f'({bases})' if bases else ''}:"
    start = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    end = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    line = f"{start} {node.name}({ast.unparse(node.args)}){end}: ..."
    if len(line) <= WIDTH:
        return line
    arguments = ",\n".join(f"    {part}" for part in _split_arguments(node.args))
    return f"{start} {node.name}(\n{arguments},\n){end}: ..."


def _split_arguments(arguments: ast.arguments) -> list[str]:
    parts, depth, start = [], 0, 0
    words = ast.unparse(arguments)
    for at, letter in enumerate(words):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(words[start:at].strip())
            start = at + 1
    return [*parts, words[start:].strip()]


def _indent(text: str) -> str:
    return textwrap.indent(text, "    ")


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"  # other tools run and format blocks of Python


def _paragraph(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("``", "`")
    return f"\n{text}\n" if text and not text.startswith(("Args:", "Attributes:", "Returns:")) else ""


def render(module: str) -> str:
    """Return the page of a module with the signatures of its names."""
    page = (ROOT / "docs" / "api" / f"{module}.md").read_text(encoding="utf-8")
    names = "\n".join(describe(name, home) for name, home in exports(module).items())
    block = f"{BEGIN}\n\n{names}\n{END}\n\n"
    directive = f"::: {module}\n"
    return BLOCK.sub("", page).replace(directive, block + directive)


def pages() -> list[str]:
    """Return the modules that have a page."""
    return sorted(path.stem for path in (ROOT / "docs" / "api").glob("*.md"))


if __name__ == "__main__":
    for name in pages():
        (ROOT / "docs" / "api" / f"{name}.md").write_text(render(name), encoding="utf-8")
    NAMES.write_text(names_page(), encoding="utf-8")
