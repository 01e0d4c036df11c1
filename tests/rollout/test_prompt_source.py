"""Prompt sources of plugins: endless, resumed where they stopped, for evaluation; and the report of an evaluation."""

from __future__ import annotations

import pytest

from miles_core.errors import ConfigError, DataError, PluginError

PLUGIN = """
from miles_core.data import PromptSource, Row
from miles_core.plugin import Plugin, hookimpl

EVENTS = []

class Letters(PromptSource):
    def __init__(self, data, purpose):
        self.first, self.at, self.purpose = ord(data or "a"), 0, purpose
        self.length = 3 if purpose == "evaluation" and data != "z" else None

    async def start(self):
        EVENTS.append(("start", self.purpose))

    async def stop(self):
        EVENTS.append(("stop", self.purpose))

    def next(self, n):
        made = [Row(chr(self.first + (self.at + i) % 20), index=self.at + i) for i in range(n)]
        self.at += n
        return made

    def state(self):
        return {"at": self.at}

    def load_state(self, state):
        self.at = state["at"]

def make(data, purpose):
    return Letters(data, purpose)

def make_wrong():
    return [1, 2]

@hookimpl
def on_start(run):
    run.state["events"], run.state["evaluations"] = EVENTS, []

@hookimpl
def on_evaluation(run, name, groups, metrics):
    run.state["evaluations"].append((name, [[s.prompt for s in group] for group in groups], dict(metrics)))
    metrics["eval/words"] = 7.0

plugin = Plugin(
    name="letters", summary="letters", version="1", core=">=0", hooks={"": f"{__name__}:"},
    provides={"prompts": {"letters": f"{__name__}:make", "wrong": f"{__name__}:make_wrong"}},
)
"""


@pytest.fixture
def run(toy_run, tmp_path):
    (tmp_path / "letters.py").write_text(PLUGIN)
    return lambda **options: toy_run(
        [str(tmp_path / "letters.py")], **{"prompts": "letters", "prompt_data": None, **options}
    )


def test_an_endless_source_is_resumed_where_it_stopped(run, tmp_path):
    done = run(steps=3)
    prompts = [s["prompt"] for s in done.samples[::4]]
    assert prompts == list("abcdef") and done.run.state["events"] == [("start", "train"), ("stop", "train")]
    run(steps=2, directory=tmp_path / "two")
    more = run(steps=3, directory=None, save=None, load=tmp_path / "two")
    assert [s["prompt"] for s in more.samples[::4]] == prompts


def test_evaluation_from_a_source_and_what_is_told_about_it(run, tmp_path):
    (tmp_path / "held.jsonl").write_text('{"input": "x"}\n{"input": "y"}\n')
    done = run(
        steps=1,
        prompt_data="c",
        eval_prompts="letters,file",
        eval_prompt_data=f"gym=k,{tmp_path / 'held.jsonl'}",
        eval_interval=1,
        n_samples_per_eval_prompt=2,
    )
    assert [s["prompt"] for s in done.samples[::4]] == ["c", "d"]
    found = [(name, prompts) for name, prompts, _ in done.run.state["evaluations"]]
    assert found == [("gym", [["k"] * 2, ["l"] * 2, ["m"] * 2]), ("", [["x"] * 2, ["y"] * 2])] * 2
    assert set(done.run.state["evaluations"][0][2]) == {"eval/gym/reward", "eval/gym/accuracy", "eval/gym/length_mean"}
    last = done.metrics[-1]
    assert last["eval/words"] == 7.0
    gym, plain = (numbers for _, _, numbers in done.run.state["evaluations"][-2:])
    assert last["eval/reward"] == pytest.approx((3 * gym["eval/gym/reward"] + 2 * plain["eval/reward"]) / 5)


def test_sources_that_do_not_fit(run, tmp_path):
    with pytest.raises(
        PluginError,
        match=r"hook make_prompts \(wrong\): it returned a list of 2 \(int\); expected a miles_core.data.prompt_source.PromptSource",
    ):
        run(prompts="wrong")
    held = {"eval_interval": 1, "steps": 1}
    with pytest.raises(
        ConfigError, match="the data set 'z' has the length None; evaluation needs a source with an end"
    ):
        run(eval_prompts="letters", eval_prompt_data="z=z", **held)
    with pytest.raises(ConfigError, match="--eval-prompts letters,file names 2 sources for the 1 data sets"):
        run(eval_prompts="letters,file", eval_prompt_data="k", **held)
    with pytest.raises(
        DataError, match="came from --prompts letters when the checkpoint was saved, and come from file now"
    ):
        run(steps=1, directory=tmp_path / "one")
        (tmp_path / "p.jsonl").write_text('{"input": "x"}\n')
        run(steps=2, directory=None, save=None, load=tmp_path / "one", prompts="file", prompt_data=tmp_path / "p.jsonl")


def test_prompts_of_a_source_are_checked_when_they_come(run):
    with pytest.raises(DataError, match="leaves no room for a response within 1 tokens"):
        run(rollout_max_context_len=1, rollout_max_response_len=1)
