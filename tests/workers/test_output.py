"""What workers write, in the run's log."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading

from miles_workers.output import Output, last_lines, path_of, worker_name

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
    with caplog.at_level(logging.INFO, logger="miles_workers"):
        asyncio.run(output.close())
    found = [record.getMessage() for record in caplog.records if record.name.startswith("miles_workers")]
    own = ["miles_thing.work: ready", "Traceback (most recent call last):"]
    assert found[:2] == ["a: somewhere: a file is missing", "a: " + LINES.splitlines()[1].replace("{n}", "0")]
    assert found[2:] == [f"{name}: {line}" for name in "ab" for line in own]


def test_a_worker_knows_its_name(tmp_path):
    code = f"from miles_workers import worker_name, write_there; write_there({str(tmp_path)!r}, 'engine-3', 'info'); print(worker_name())"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert path_of(tmp_path, "engine-3").read_text().splitlines()[-1] == "engine-3"
    assert worker_name() == ""


def test_only_files_that_have_grown_are_opened_and_not_in_the_event_loop(tmp_path, caplog, monkeypatch):
    path_of(tmp_path, "a").parent.mkdir()
    for number in range(300):
        path_of(tmp_path, f"worker-{number}").write_text("a line\n")
    output, opened, threads = Output(tmp_path), [], set()  # lines of an earlier process are not copied
    path_open = type(tmp_path).open

    def watched(path, *args, **options):
        opened.append(path.stem)
        threads.add(threading.current_thread())
        return path_open(path, *args, **options)

    monkeypatch.setattr(type(tmp_path), "open", watched)
    with path_open(path_of(tmp_path, "worker-7"), "a") as file:
        file.write("one more\nhalf a li")
    with caplog.at_level(logging.INFO, logger="miles_workers"):
        asyncio.run(output.close())
    assert opened == ["worker-7"] and threading.main_thread() not in threads
    copied = [record.getMessage() for record in caplog.records if record.name.startswith("miles_workers")]
    assert copied == ["worker-7: one more"]


def test_a_copy_that_is_cancelled_loses_no_line(tmp_path, caplog):
    path_of(tmp_path, "a").parent.mkdir()
    output = Output(tmp_path)

    async def stop_while_reading():
        path_of(tmp_path, "a").write_text("one\n")
        task = asyncio.create_task(output._repeat())
        await asyncio.sleep(0)  # the thread has started
        task.cancel()
        await asyncio.wait([task])
        await output.close()

    with caplog.at_level(logging.INFO, logger="miles_workers"):
        asyncio.run(stop_while_reading())
    assert [record.getMessage() for record in caplog.records] == ["a: one"]


def test_the_last_lines_of_a_lost_worker_are_its_own(tmp_path):
    start = "INFO miles_workers.output: process {} on host\n"
    noise = "Failed to load /lib/other.so: no such file\nWARNING somewhere: old\nW1122 05:12:08.994000 13770 else.py:630] old\n"
    own = "INFO miles_thing.work: ready\nin the middle of it\nTraceback (most recent call last):\n  File x\nValueError: y\n"
    path_of(tmp_path, "a").parent.mkdir()
    path_of(tmp_path, "a").write_text(
        start.format(1) + "of an earlier process\n" + start.format(2) + noise + own + "1/3\r2/3\r\n"
    )
    path_of(tmp_path, "b").write_text(start.format(3) + noise)
    assert last_lines(tmp_path, "a") == (*own.splitlines(), "2/3")
    assert last_lines(tmp_path, "b") == () and last_lines(tmp_path, "c") == ()
