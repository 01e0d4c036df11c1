"""The list of slow tests names tests that exist."""

from __future__ import annotations

from tests.list_slow_tests import LIST, ROOT, choose


def test_every_entry_exists():
    entries = [line.partition("[")[0].partition("::") for line in LIST.read_text(encoding="utf-8").splitlines()]
    texts = {
        file: (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else "" for file, _, _ in entries
    }
    # A method may be inherited from a contract, and a class made by a function.
    gone = [f"{file}::{name}" for file, _, name in entries if "::" not in name and f"def {name}(" not in texts[file]]
    gone += [f"{file}::{name}" for file, _, name in entries if not texts[file]]
    assert not gone, f"run make test-thorough and make slow-tests again: {gone}"


def test_the_fastest_of_a_file_stay_and_a_function_is_one_entry():
    seconds = {"test_a": 0.1, "test_b[1]": 0.9, "test_b[2]": 1.0, "test_b[3]": 1.2, "test_c[1]": 3.0, "test_c[2]": 2.0}
    assert choose(seconds) == ["test_b[3]", "test_c"]
