"""What workers write, in the run's log."""

from __future__ import annotations

import asyncio
import logging

from miles_runtime.output import Output, last_lines, path_of

LINES = """WARNING somewhere: a file is missing
W1122 05:12:08.994000 1377{n} somewhere/else.py:630] an old name
INFO miles_thing.work: ready
Traceback (most recent call last):
"""


def test_what_a_library_has_every_worker_say_is_said_once(tmp_path, caplog):
    output = Output(tmp_path)
    path_of(tmp_path, "a").parent.mkdir()
    for n, name in enumerate(("a", "b")):
        path_of(tmp_path, name).write_text(LINES.replace("{n}", str(n)))
    with caplog.at_level(logging.INFO, logger="miles_runtime"):
        asyncio.run(output.close())
    said = [record.getMessage() for record in caplog.records]
    own = ["miles_thing.work: ready", "Traceback (most recent call last):"]
    assert said[:2] == ["a: somewhere: a file is missing", "a: " + LINES.splitlines()[1].replace("{n}", "0")]
    assert said[2:] == [f"{name}: {line}" for name in "ab" for line in own]


def test_the_last_lines_of_a_lost_worker_are_its_own(tmp_path):
    start = "INFO miles_runtime.output: process {} on host\n"
    noise = "Failed to load /lib/other.so: no such file\nWARNING somewhere: old\nW1122 05:12:08.994000 13770 else.py:630] old\n"
    own = "INFO miles_thing.work: ready\nin the middle of it\nTraceback (most recent call last):\n  File x\nValueError: y\n"
    path_of(tmp_path, "a").parent.mkdir()
    path_of(tmp_path, "a").write_text(
        start.format(1) + "of an earlier process\n" + start.format(2) + noise + own + "1/3\r2/3\r\n"
    )
    path_of(tmp_path, "b").write_text(start.format(3) + noise)
    assert last_lines(tmp_path, "a") == (*own.splitlines(), "2/3")
    assert last_lines(tmp_path, "b") == () and last_lines(tmp_path, "c") == ()
