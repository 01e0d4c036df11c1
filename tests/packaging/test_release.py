"""The release script, in a small repository."""

import datetime
import hashlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).with_name("release.py")))
BUILD = "import pathlib; d = pathlib.Path('dist'); d.mkdir(exist_ok=True); (d / 'a.whl').write_bytes(b'wheel')"


def git(root, *words):
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    for folder in ("miles_core", "plugins/one/miles_one"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("miles_core/version.py", "plugins/one/miles_one/__init__.py"):
        (tmp_path / file).write_text('"""A package."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 0.1.0 (unreleased)\n\n- It trains.\n\n## 0.0.1 (2026-01-01)\n\n- Old.\n"
    )
    (tmp_path / ".gitignore").write_text("dist\n")
    git(tmp_path, "init", "--quiet")
    for name, value in (("user.name", "someone"), ("user.email", "someone@example.org"), ("tag.gpgSign", "false")):
        git(tmp_path, "config", name, value)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "begin")
    return tmp_path


def test_a_release_has_one_version_notes_checksums_a_commit_and_a_tag(repository, capsys):
    SCRIPT["release"](repository, "0.2.0", [sys.executable, "-c", BUILD])
    for file in ("miles_core/version.py", "plugins/one/miles_one/__init__.py"):
        assert '__version__ = "0.2.0"' in (repository / file).read_text()
    assert f"## 0.2.0 ({datetime.date.today()})" in (repository / "CHANGELOG.md").read_text()
    notes = (repository / "dist" / "NOTES.md").read_text()
    assert "- It trains." in notes and "Old" not in notes
    sums = (repository / "dist" / "SHA256SUMS").read_text().splitlines()
    assert f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl" in sums and len(sums) == 2
    assert git(repository, "tag") == "v0.2.0" and git(repository, "log", "-1", "--format=%s") == "Release 0.2.0"
    assert git(repository, "status", "--porcelain") == "" and "git push" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"v0\.2\.0 is already a tag"):
        SCRIPT["release"](repository, "0.2.0", [])
    with pytest.raises(SystemExit, match="no notes below a heading"):
        SCRIPT["release"](repository, "0.3.0", [])


@pytest.mark.parametrize(
    ("version", "build", "message"),
    [
        ("0.0.9", BUILD, "0.0.9 is older than the current version 0.1.0"),
        ("next", BUILD, "'next' is no version"),
        ("0.2.0", "raise SystemExit(1)", "the wheels are not sound"),
    ],
)
def test_a_release_that_fails_changes_nothing(repository, version, build, message):
    with pytest.raises(SystemExit, match=message):
        SCRIPT["release"](repository, version, [sys.executable, "-c", build])
    assert git(repository, "status", "--porcelain") == "" and git(repository, "tag") == ""


def test_changes_have_to_be_committed_first(repository):
    (repository / "notes.txt").write_text("draft")
    with pytest.raises(SystemExit, match=r"commit or remove these changes first:\n\?\? notes.txt"):
        SCRIPT["release"](repository, "0.2.0", [])
