"""Writes installed plugins."""

import sys

import pytest


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(name, code, distribution=...)`` puts a plugin's package and metadata on ``sys.path``."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def write(name, code, hooks="", distribution=None, version="0.1.0", package=None):
        distribution, package = distribution or f"miles-plugin-{name}", package or f"miles_test_{name}"
        folder = tmp_path / "site" / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(code)
        if hooks:
            (folder / "hooks.py").write_text(hooks)
        info = tmp_path / "site" / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[miles.plugins]\n{name} = {package}:plugin\n")
        monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.delitem(sys.modules, f"{package}.hooks", raising=False)

    return write
