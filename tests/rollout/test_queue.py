"""Prompts are numbered, and given back when unused."""

from __future__ import annotations

import pytest

from miles_core.data.column import TOKENS, Column
from miles_core.data.prompt_source import PromptSource, Row
from miles_core.data.sample import Sample
from miles_core.errors import DataError
from miles_core.rollout.queue import Prompt, PromptQueue


class Rows(PromptSource):
    """Rows a, b, c, ... without end."""

    def __init__(self):
        self.at = 0

    def next(self, n):
        made = [
            Row(chr(97 + self.at + i), metadata={"at": self.at + i}, policy="b" if self.at + i == 1 else "")
            for i in range(n)
        ]
        self.at += n
        return made

    def state(self):
        return {"at": self.at}

    def load_state(self, state):
        self.at = state["at"]


def queue():
    return PromptQueue(Rows(), lambda rows: [[ord(row.prompt)] for row in rows])


def test_samples_have_running_numbers_and_their_own_metadata():
    first, second = queue().next(2)
    made = second.samples(3)
    assert {s.policy for s in made} == {"b"} and first.policy == ""
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
    one.mark_used(first[:2])
    two.load_state(json.loads(json.dumps(one.state())))
    assert [(p.text, p.group_index, p.tokens, p.policy) for p in one.next(2)] == [
        (p.text, p.group_index, p.tokens, p.policy) for p in two.next(2)
    ]


def test_rows_that_are_too_long_are_left_out_and_counted():
    prompts = PromptQueue(Rows(), lambda rows: [None if row.prompt in "bc" else [1] for row in rows])
    assert [p.text for p in prompts.next(3)] == ["a", "d", "e"] and prompts.left_out == 2
    assert [p.group_index for p in prompts.next(1)] == [3]
    with pytest.raises(
        DataError, match="the last 1000 prompts of the source are all longer than --rollout-max-prompt-len"
    ):
        PromptQueue(Rows(), lambda rows: [None] * len(rows)).next(1)


@pytest.mark.parametrize("rows", [[], None, [Row("a"), Row("b")], ["a"]])
def test_a_source_that_returns_something_else_is_named(rows):
    source = Rows()
    source.next = lambda n: rows
    with pytest.raises(
        DataError, match=r"the prompt source: Rows.next\(1\) returned .*expected a list of 1 miles_core.data.Row"
    ):
        PromptQueue(source, lambda rows: [[1]] * len(rows)).next(1)


def test_a_position_in_another_source_is_refused():
    state = PromptQueue(Rows(), lambda rows: [[1]] * len(rows), "sums").state()
    with pytest.raises(
        DataError, match="came from --prompts sums when the checkpoint was saved, and come from file now"
    ):
        PromptQueue(Rows(), lambda rows: [[1]] * len(rows)).load_state(state)


def test_samples_of_a_prompt_share_no_value_that_a_user_may_change():
    made = Prompt([{"role": "user", "content": "a"}], Column(TOKENS, [1, 2]), "b", {"of": [1]}, 2, "judge").samples(2)
    first, second = made
    first.metadata["of"].append(2)
    first.prompt[0]["content"] = "c"
    first.fields["x"], first.tokens = 1, [*first.tokens, 3]
    first.weight_versions.append((0, 1))
    assert second == Sample(
        prompt=[{"role": "user", "content": "a"}],
        tokens=[1, 2],
        label="b",
        metadata={"of": [1]},
        group_index=2,
        index=5,
        policy="judge",
    )
