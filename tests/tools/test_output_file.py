"""Files that commands write: in one piece, without credentials, and never through a link."""

from __future__ import annotations

import os

import pytest

from miles_core.errors import MilesError
from miles_core.redact import MARK
from miles_tools.output_file import make_folder, write_file


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_replaced_and_its_target_stays(tmp_path, link):
    (tmp_path / "target").write_text("mine")
    link(tmp_path / "target", tmp_path / "page.html")
    write_file(tmp_path / "page.html", "new")
    assert (tmp_path / "page.html").read_text() == "new" and not (tmp_path / "page.html").is_symlink()
    assert (tmp_path / "target").read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["page.html", "target"]


def test_text_is_redacted_and_bytes_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "Q7zSecretOfThisTest99")
    write_file(tmp_path / "a", "Q7zSecretOfThisTest99")
    write_file(tmp_path / "b", b"Q7zSecretOfThisTest99")
    assert (tmp_path / "a").read_text() == MARK and (tmp_path / "b").read_bytes() == b"Q7zSecretOfThisTest99"


def test_what_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(MilesError, match=r"a cannot be written \(No such file or directory\)"):
        write_file(tmp_path / "missing/a", "")


def test_a_folder_that_leads_elsewhere_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "report").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MilesError, match="report is a link, and a directory is written there: remove it"):
        make_folder(tmp_path / "report")
    (tmp_path / "file").touch()
    with pytest.raises(MilesError, match="file is a file"):
        make_folder(tmp_path / "file")
    make_folder(tmp_path / "elsewhere")
