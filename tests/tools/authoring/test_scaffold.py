import os
import subprocess
import sys
from pathlib import Path

import pytest

import miles_core
from miles_core.errors import PluginError
from miles_tools.authoring.scaffold import write_plugin


def outcome_of(directory, installed):
    """What pytest says of a generated distribution, before ``pip install -e`` and after it."""
    made = [directory, Path(miles_core.__file__).parents[1]]
    if installed:
        metadata = directory / "made-0.1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: made\nVersion: 0.1.0\n")
        (metadata / "entry_points.txt").write_text("[miles.plugins]\nmy_format = miles_my_format:plugin\n")
    path = os.pathsep.join([*map(str, made), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(directory)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=directory, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("installed", "says"), [(False, "2 passed, 1 skipped"), pytest.param(True, "3 passed", marks=pytest.mark.thorough)]
)
def test_a_new_plugin_passes_its_own_tests(tmp_path, installed, says):
    directory = tmp_path / "made"
    files = write_plugin("my_format", directory)
    assert {str(f.relative_to(directory)) for f in files} == {
        "README.md",
        "pyproject.toml",
        "conftest.py",
        "miles_my_format/__init__.py",
        "miles_my_format/hooks.py",
        "tests/test_my_format.py",
    }
    assert says in outcome_of(directory, installed)


@pytest.mark.parametrize(("installed", "least"), [(False, 15), pytest.param(True, 22, marks=pytest.mark.thorough)])
def test_a_new_number_format_passes_its_own_tests(tmp_path, installed, least):
    directory = tmp_path / "made"
    files = write_plugin("my_format", directory, format=True)
    assert directory / "miles_my_format" / "format.py" in files
    said = outcome_of(directory, installed)
    assert int(said.split(" passed")[0].split()[-1]) > least and "failed" not in said


def test_its_metadata_registers_the_entry_point(tmp_path):
    import tomllib

    write_plugin("my_format", tmp_path / "made")
    metadata = tomllib.loads((tmp_path / "made" / "pyproject.toml").read_text())
    assert metadata["project"]["entry-points"] == {"miles.plugins": {"my_format": "miles_my_format:plugin"}}
    assert metadata["project"]["name"] == "miles-plugin-my-format"
    assert metadata["project"]["dependencies"] == ["miles-core ~= 0.1"]


@pytest.mark.parametrize("name", ["Mine", "my-format", "1st", "class", "core", "", "../x"])
def test_a_name_that_cannot_be_a_packages_is_refused(tmp_path, name):
    with pytest.raises(PluginError, match="cannot name a plugin"):
        write_plugin(name, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(PluginError, match="exists and is not empty"):
        write_plugin("mine", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]
