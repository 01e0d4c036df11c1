"""Missing bytecode is found, reported, and stored by child processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.observe import bytecode


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "large_package_of_a_test"
    (tmp_path / "site" / name).mkdir(parents=True)
    (tmp_path / "site" / name / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    importlib.invalidate_caches()
    return name


def test_a_package_without_bytecode_is_named_only_if_python_stores_none(package: str) -> None:
    assert bytecode.find_recompiled([package, "no_such_package"]) == (package,)
    said = bytecode.explain([package], {"PYTHONDONTWRITEBYTECODE": "1"})
    assert f"imports of {package} are recompiled on every start because PYTHONDONTWRITEBYTECODE is set" in said
    assert bytecode.explain([package], {}) == "" == bytecode.explain([package], {"PYTHONDONTWRITEBYTECODE": ""})


def test_a_child_process_stores_bytecode_in_the_cache_folder(package: str, tmp_path: Path) -> None:
    here = {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    changes = bytecode.variables([package], here)
    environment = {
        k: v for k, v in {**os.environ, **here, **changes, "PYTHONPATH": str(tmp_path / "site")}.items() if v
    }
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    subprocess.run([sys.executable, "-c", f"import {package}"], env=environment, check=True)
    assert list((tmp_path / "cache" / "miles" / "bytecode").rglob("__init__.*.pyc"))
    assert not list((tmp_path / "site").rglob("*.pyc"))
    assert bytecode.variables([package], {**here, "PYTHONPYCACHEPREFIX": "/else"})["PYTHONPYCACHEPREFIX"] == "/else"


def test_nothing_changes_with_bytecode_or_without_the_variable(package: str, tmp_path: Path) -> None:
    assert bytecode.variables([package], {}) == {}
    source = tmp_path / "site" / package / "__init__.py"
    beside = {k: v for k, v in os.environ.items() if k != "PYTHONPYCACHEPREFIX"}
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(source)], check=True, env=beside)
    assert (
        bytecode.variables([package], {"PYTHONDONTWRITEBYTECODE": "1"})
        == {}
        == dict.fromkeys(bytecode.find_recompiled([package]))
    )
