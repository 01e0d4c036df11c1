"""Calls in worker processes, in the event loop and on instances: results, errors, time-outs, and tools that misbehave."""

import asyncio
import time

import pytest

from miles_core.data import Sample
from miles_core.plugin import ConfigError
from miles_tool_calls.config import ToolsConfig
from miles_tool_calls.outcome import Outcome, ToolFault
from miles_tool_calls.toolbox import Toolbox

TOOLS = '''
import asyncio, os, sys, time

def add(a: int, b: int) -> int:
    """Add."""
    print("x" * 1_000_000)
    return a + b

def misbehave(how: str) -> object:
    """Do something bad."""
    if how == "raise":
        raise KeyError("no")
    if how == "exit":
        sys.exit(3)
    if how == "end":
        os._exit(7)
    if how == "fork":
        return "parent" if os.fork() else "child"
    if how == "nan":
        return float("nan")
    if how == "long":
        return "y" * 5_000_000
    if how == "hold":
        return 7 ** (10 ** 9)  # holds the interpreter's lock
    time.sleep(60)

async def wait(seconds: float) -> str:
    """Wait."""
    if seconds < -1:
        raise TimeoutError("no answer")
    if seconds < 0:
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)
    return "done"

class Notes:
    """Notes."""
    log = []

    def __init__(self, row):
        if row.get("bad"):
            raise OSError("disk full")
        self.notes, self.number = [], row["number"]

    def write(self, text: str) -> int:
        """Write a note."""
        if text == "slow":
            time.sleep(.4)
        if text == "exit":
            sys.exit(1)
        if text == "time":
            raise TimeoutError("no answer")
        self.notes.append(text)
        return len(self.notes)

    async def read(self) -> list[str]:
        """Read all notes."""
        return self.notes

    async def close(self):
        self.log.append(self.number)
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(TOOLS)
    return str(path)


def call_all(box, *calls, metadata=None, seconds=20.0, limit=100):
    """Call tools one after the other with one sample."""

    async def main():
        await box.start()
        try:
            async with box.open(Sample(index=3, metadata=metadata or {"number": 1})) as session:
                return [await session.call(name, arguments, seconds, limit) for name, arguments in calls]
        finally:
            await box.stop()

    return asyncio.run(main())


def test_plain_functions_run_in_processes_that_survive_them(path):
    box = Toolbox(ToolsConfig(functions=(path,), workers=1))
    bad = [("misbehave", {"how": how}) for how in ("raise", "exit", "fork", "nan", "long", "end")]
    sum_, *results, again, wrong, missing, odd = call_all(
        box,
        ("add", {"a": 1, "b": 2}),
        *bad,
        ("add", {"a": "4", "b": 5}),
        ("add", {"a": "x"}),
        ("subtract", {}),
        ("add", {"a": {1}, "b": 1}),
    )
    assert sum_ == Outcome("3") and again == Outcome("9")
    assert [r.text for r in results[:4]] == ["Error: KeyError: 'no'", "Error: SystemExit: 3", "parent", "NaN"]
    assert [r.failed for r in results] == [True, True, False, False, False, True]
    assert results[4].text == "y" * 100 + "\n[4999900 more characters were cut]"
    assert results[5].text == "Error: its process ended with the exit code 7"
    assert wrong.text.startswith("Error: wrong arguments: a: Input should be a valid integer")
    assert missing.text == "Error: there is no tool 'subtract'; the tools are: add, misbehave, wait"
    assert odd.failed and "wrong arguments" in odd.text


def test_calls_that_take_too_long_end_with_their_process(path):
    box = Toolbox(ToolsConfig(functions=(path,), workers=2))

    async def main():
        async with box.open(Sample()) as session:
            await asyncio.gather(*(session.call("add", {"a": 1, "b": 1}, 20, 9) for _ in range(2)))
            started = time.monotonic()
            calls = [session.call("misbehave", {"how": how}, 0.2, 9) for how in ("hold", "sleep")]
            outcomes = await asyncio.gather(*calls)
            assert time.monotonic() - started < 5
            dropped = asyncio.ensure_future(session.call("misbehave", {"how": "sleep"}, 60, 9))
            await asyncio.sleep(0.5)
            dropped.cancel()
            await asyncio.gather(dropped, return_exceptions=True)
            left = len(box.pool._all)
        await box.stop()
        return outcomes, left

    outcomes, left = asyncio.run(main())
    assert {o.text for o in outcomes} == {"Error: the call took longer than 0.2 seconds and was ended"}
    assert left == 0 and not any(o.broken for o in outcomes)


def test_async_functions_and_instances_of_a_sample(path):
    box = Toolbox(ToolsConfig(functions=(f"{path}:wait", f"{path}:Notes")))
    assert box.pool is None
    log = box.functions["write"].owner.log
    log.clear()
    wait, cancelled, one, two, out, read = call_all(
        box,
        ("wait", {"seconds": 0}),
        ("wait", {"seconds": -1}),
        ("write", {"text": "a"}),
        ("write", {"text": "b"}),
        ("write", {"text": "exit"}),
        ("read", {}),
    )
    assert (wait.text, one.text, two.text, read.text) == ("done", "1", "2", '["a", "b"]')
    assert cancelled == Outcome.error("CancelledError") and out == Outcome.error("RuntimeError: SystemExit: 1")
    assert log == [1]  # closed once
    (late,) = call_all(box, ("wait", {"seconds": 9}), seconds=0.05)
    assert late.failed and not late.broken and "longer than 0.05 seconds" in late.text
    (slow,) = call_all(box, ("write", {"text": "slow"}), seconds=0.05)
    assert slow.broken  # its thread still changes the instance
    with pytest.raises(ToolFault, match="the tool class Notes cannot be instantiated: OSError: disk full"):
        call_all(box, ("read", {}), metadata={"bad": True})


def test_a_timeout_error_of_the_tool_itself_is_an_ordinary_error(path):
    box = Toolbox(ToolsConfig(functions=(f"{path}:wait", f"{path}:Notes")))
    calls = [("wait", {"seconds": -2}), ("write", {"text": "time"})]
    assert call_all(box, *calls) == [Outcome.error("TimeoutError: no answer")] * 2  # not broken: the instance is idle


def test_concurrent_calls_are_limited(path):
    box = Toolbox(ToolsConfig(functions=(f"{path}:wait",), concurrency=2))

    async def main():
        async with box.open(Sample()) as session:
            started = time.monotonic()
            outcomes = await asyncio.gather(*(session.call("wait", {"seconds": 0.1}, 0.15, 9) for _ in range(6)))
            return time.monotonic() - started, outcomes

    seconds, outcomes = asyncio.run(main())
    assert seconds >= 0.3 and not any(o.failed for o in outcomes)  # waiting does not count


def test_two_tools_with_one_name_are_refused(path):
    with pytest.raises(ConfigError, match=r"two tools have the name 'add' .*choose functions with FILE.py:NAME"):
        Toolbox(ToolsConfig(functions=(path, f"{path}:add")))


def test_a_worker_that_cannot_import_the_tools(path, tmp_path):
    """The file changes between the start of the run and the start of a worker."""
    (tmp_path / "mine.py").write_text("def f() -> int:\n    'x'\n    return 1")
    box = Toolbox(ToolsConfig(functions=(str(tmp_path / "mine.py"),)))
    (tmp_path / "mine.py").write_text("import nothing_here")
    with pytest.raises(ConfigError, match=r"in a process for tools: .*nothing_here"):
        call_all(box, ("f", {}))
