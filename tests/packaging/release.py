"""Make a release: python tests/packaging/release.py 0.2.0 --python python3.12 --torch torch==2.13.0

Sets the version of core and of every plugin, dates the changelog's unreleased section, builds and checks the wheels (``check_wheels.py``), and writes
``dist/NOTES.md`` and ``dist/SHA256SUMS``. Then it commits and tags. Nothing is pushed or uploaded; the last lines say how. If a step fails,
the files are as before. Called by ``make release VERSION=0.2.0``.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

_VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
_UNRELEASED = re.compile(r"^## (\S+) \(unreleased\)\n", re.MULTILINE)


def version_files(root: Path) -> list[Path]:
    """Return the files with the version of core or of a plugin."""
    return [root / "miles_core" / "version.py", *sorted(root.glob("plugins/*/miles_*/__init__.py"))]


def set_version(root: Path, version: str) -> None:
    """Write a version into every file that has one.

    Raises SystemExit if the version is invalid or older than the current one, or if a file has no version.
    """
    current = _VERSION.search((root / "miles_core" / "version.py").read_text(encoding="utf-8"))
    try:
        if current is None or Version(version) < Version(current[1]):
            raise SystemExit(f"{version} is older than the current version {current and current[1]}")
    except InvalidVersion:
        raise SystemExit(f"{version!r} is no version; write one such as 0.2.0") from None
    for path in version_files(root):
        text, count = _VERSION.subn(f'__version__ = "{version}"', path.read_text(encoding="utf-8"))
        if count != 1:
            raise SystemExit(f"{path} has {count} lines with __version__, and needs one")
        path.write_text(text, encoding="utf-8")


def date_notes(root: Path, version: str, day: datetime.date) -> str:
    """Replace the changelog's heading ``## X (unreleased)`` by the version and the day; return the notes below it.

    Raises SystemExit if there is no such section, or nothing in it.
    """
    path = root / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8")
    found = _UNRELEASED.search(text)
    notes = re.split(r"^## ", text[found.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip() if found else ""
    if not found or not notes:
        raise SystemExit("CHANGELOG.md has no notes below a heading '## X.Y.Z (unreleased)'; write what changed")
    path.write_text(text.replace(found[0], f"## {version} ({day})\n", 1), encoding="utf-8")
    return notes


def write_sums(folder: Path) -> Path:
    """Write SHA256SUMS of all files in a folder, in the format of ``sha256sum``."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    sums = folder / "SHA256SUMS"
    sums.write_text("".join(lines), encoding="utf-8")
    return sums


def git(root: Path, *words: str) -> str:
    """Run git and return its output; raises SystemExit if it fails."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def release(root: Path, version: str, build: list[str]) -> None:
    """Make the release; ``build`` is the command that builds and checks the wheels into ``dist``."""
    if changed := git(root, "status", "--porcelain"):
        raise SystemExit(f"commit or remove these changes first:\n{changed}")
    if git(root, "tag", "--list", f"v{version}"):
        raise SystemExit(f"v{version} is already a tag; choose a new version")
    try:
        set_version(root, version)
        notes = date_notes(root, version, datetime.date.today())
        if subprocess.run(build, cwd=root, check=False).returncode:
            raise SystemExit("the wheels are not sound; nothing was released")
    except BaseException:
        git(root, "checkout", "--quiet", "--", ".")
        raise
    dist = root / "dist"
    (dist / "NOTES.md").write_text(f"# miles-core {version}\n\n{notes}\n", encoding="utf-8")
    write_sums(dist)
    git(root, "commit", "--quiet", "--all", "--message", f"Release {version}")
    git(root, "tag", "--annotate", f"v{version}", "--message", f"miles-core {version}")
    print(f"released {version} here. To publish it: git push --follow-tags && python -m twine upload dist/*.whl")


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="such as 0.2.0")
    parser.add_argument("--python", default=sys.executable, help="the Python to make environments with")
    parser.add_argument("--torch", default="torch", help="as for check_wheels.py")
    given = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    check = [sys.executable, "tests/packaging/check_wheels.py", "--python", given.python, "--torch", given.torch]
    release(root, given.version, [*check, "--out", "dist"])


if __name__ == "__main__":
    main()
