"""Prompts that rollout workers read from the prompt files."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from miles_core.data import prompt_index, prompts
from miles_core.data.prompt_source import PromptSource, Row
from miles_core.data.prompts import Prompts
from miles_core.errors import DataError
from miles_core.rollout.queue import FILE, NO_LIMITS, PromptQueue, encode_rows, examine
from miles_workers.prompt_rows import PendingGroup, RowPrompt, RowQueue, RowReader
from miles_workers.remote_sample import pack_samples

CONFIG = SimpleNamespace(rollout=SimpleNamespace(max_prompt_len=4))


class Letters:
    """One token per letter."""

    def __init__(self):
        self.known = {}

    def __call__(self, text, encoded=None):
        return list(map(ord, text))

    def encode_texts(self, texts):
        return [None] * len(texts)


render = Letters()


@pytest.fixture
def file(tmp_path):
    rows = ["a", "bb", "c" * 9, "dd", "e", "f" * 9, "gg"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": r, "n": [r], "metadata": {"of": r}}) + "\n" for r in rows))
    return str(path)


@pytest.fixture
def reads(monkeypatch):
    """Numbers of the rows that were read."""
    found, plain = [], Prompts.row
    monkeypatch.setattr(Prompts, "row", lambda self, at: (found.append(at), plain(self, at))[1])
    return found


def make(kind, file, shuffle=True):
    source = Prompts(file, label_key="n", shuffle=shuffle, seed=3)
    examine(source, render, CONFIG, NO_LIMITS, "--prompt-data")
    return kind(source, encode_rows(render, CONFIG, NO_LIMITS), FILE, "the source")


def use(queue):
    """Take prompts over several epochs, put some back and mark some as used; return the states and what the prompts contain."""
    states, seen = [], []
    for count in (2, 4, 3, 5):
        taken = queue.next(count)
        seen += [(p.group_index, p.text, p.tokens, p.label, p.metadata, p.policy) for p in taken]
        states.append(json.dumps(queue.state(held=[taken[0].group_index])))
        queue.put_back(taken[:2])
        queue.mark_used(taken[2:])
        states.append(json.dumps(queue.state()))
    return states, seen


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_order_numbers_and_checkpoints_are_those_of_the_driver_alone(file, tmp_path, monkeypatch, shuffle, large):
    if large:  # rows that are too long are left out when they are read
        monkeypatch.setenv("MILES_CACHE", str(tmp_path / "cache"))
        for module in (prompt_index, prompts):
            monkeypatch.setattr(module, "ROWS", 4)
        monkeypatch.setattr(prompt_index, "SAMPLE", 3)
    expected, found = use(make(PromptQueue, file, shuffle)), use(make(RowQueue, file, shuffle))
    assert found == expected and len(found[1]) == 14
    for state in map(json.loads, found[0]):
        queues = [make(kind, file, shuffle) for kind in (PromptQueue, RowQueue)]
        for queue in queues:
            queue.load_state(state)
        assert use(queues[0]) == use(queues[1])


def test_the_driver_reads_a_row_when_it_uses_its_prompt(file, reads):
    queue = make(RowQueue, file, shuffle=False)
    reads.clear()
    taken = queue.next(4)
    groups = [prompt.samples(3) for prompt in taken]
    assert [group.row for group in groups] == [0, 1, 3, 4] and all(type(p) is RowPrompt for p in taken)
    assert [[*group.indexes] for group in groups[:2]] == [[0, 1, 2], [3, 4, 5]] and len(groups[0]) == 3
    again = dataclasses.replace(taken[1], group_index=9)
    queue.put_back(taken[1:])
    queue.mark_used(taken[:1])
    assert reads == [] and (again.group_index, again.row) == (9, 1)
    assert again.text == "bb" and again.tokens == [98, 98] and reads == [1]
    assert [sample.metadata for sample in groups[2]] == [{"of": "dd"}] * 3
    assert reads == [1, 3], "once"
    with pytest.raises(AttributeError):
        again.nothing  # noqa: B018


def test_a_worker_makes_the_same_samples(file):
    queue = make(RowQueue, file)
    run = SimpleNamespace(render=render, config=config(file))
    reader = RowReader(run)
    assert reader.digest == queue.digest != "" and reader.problem == ""
    for prompt in queue.next(5):
        group = prompt.samples(2)
        assert reader.read(group.row, group.indexes) == [*group]
    assert RowReader(SimpleNamespace(render=render, config=config(f"{file}@[1:]"))).digest != queue.digest


def config(path, source=FILE):
    data = SimpleNamespace(
        prompts=source, prompt_data=[path], input_key="input", label_key="n", metadata_key="metadata", media=False
    )
    return SimpleNamespace(data=data, train=SimpleNamespace(seed=3))


def test_a_worker_without_the_file_says_why(file, tmp_path):
    reader = RowReader(SimpleNamespace(config=config(str(tmp_path / "absent.jsonl"))))
    assert reader.digest == "" and reader.problem.startswith("there is no prompt file")
    other = RowReader(SimpleNamespace(config=config(file, "tasks")))
    assert (other.digest, other.problem) == ("", "")


def test_a_file_that_changes_ends_the_run(file):
    reader = RowReader(SimpleNamespace(render=render, config=config(file)))
    with open(file, "w") as other:
        other.write('{"input": "z"}\n' * 7)
    with pytest.raises(DataError, match="was changed while the run reads it"):
        reader.read(0, range(2))


class Tasks(PromptSource):
    """Rows with a long prompt."""

    def __init__(self):
        self.number = 0

    def next(self, n):
        self.number += n
        return [Row("x" * 3000, {"n": i}, {"m": [i]}, i) for i in range(self.number - n, self.number)]

    def state(self):
        return {"number": self.number}

    def load_state(self, state):
        self.number = state["number"]


def test_prompts_of_other_sources_are_sent_once_per_group():
    queue = RowQueue(Tasks(), lambda rows: [render(row.prompt) for row in rows], "tasks", "the source")
    assert queue.digest == ""
    (prompt,) = queue.next(1)
    group = prompt.samples(8)
    assert type(group) is PendingGroup and group.row is None
    assert [(s.index, s.label) for s in group] == [(i, {"n": 0}) for i in range(8)]
    assert sum(pack_samples(group[:1]).sizes) < 16_000 < sum(pack_samples([*group]).sizes)
    queue.put_back([prompt])
    restored = RowQueue(Tasks(), lambda rows: [render(row.prompt) for row in rows], "tasks", "the source")
    restored.load_state(queue.state())
    assert type(restored.next(1)[0].samples(2)) is PendingGroup
