"""Prompts are numbered, and given back when unused."""

from __future__ import annotations

from types import SimpleNamespace

from miles_core.rollout.queue import PromptQueue


class Rows:
    """Rows a, b, c, ... without end."""

    def __init__(self):
        self.at = 0

    def next(self, n):
        made = [
            SimpleNamespace(prompt=chr(97 + self.at + i), label=None, metadata={"at": self.at + i}) for i in range(n)
        ]
        self.at += n
        return made

    def state(self):
        return {"at": self.at}

    def load_state(self, state):
        self.at = state["at"]


def queue():
    return PromptQueue(Rows(), lambda text: [ord(text)])


def test_samples_have_running_numbers_and_their_own_metadata():
    first, second = queue().next(2)
    made = second.samples(3)
    assert [s.index for s in made] == [3, 4, 5] and {s.group_index for s in made} == {1}
    made[0].metadata["at"] = 7
    assert made[1].metadata == {"at": 1} and first.samples(1)[0].tokens == [97]


def test_prompts_given_back_come_first_under_new_numbers():
    prompts = queue()
    first = prompts.next(3)
    prompts.put_back(first[1:])
    again = prompts.next(3)
    assert [p.text for p in again] == ["b", "c", "d"] and [p.group_index for p in again] == [3, 4, 5]


def test_state_goes_through_json_and_back():
    import json

    one, two = queue(), queue()
    first = one.next(3)
    one.put_back(first[2:])
    one.used(first[:2])
    two.load_state(json.loads(json.dumps(one.state())))
    assert [(p.text, p.group_index, p.tokens) for p in one.next(2)] == [
        (p.text, p.group_index, p.tokens) for p in two.next(2)
    ]
