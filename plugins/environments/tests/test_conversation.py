"""Conversations with a program that requests answers over HTTP: a small stand-in for agents and their environments."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from miles_environments.conversation import Conversation, Endpoint
from miles_environments.environment import EnvironmentFault

HEADER = "X-Test-Key"


class Program:
    """Asks through an endpoint; ``play(ask)`` is the program."""

    def __init__(self, endpoint, pool, play):
        self.endpoint, self.pool, self.play = endpoint, pool, play

    def open(self, key):
        def begin(conversation):
            self.endpoint.conversations[key] = conversation
            return self.pool.submit(self.play, lambda messages, **more: self.ask(key, messages, **more))

        return Conversation(begin)

    def ask(self, key, messages, **more):
        body = json.dumps({"model": "m", "messages": messages, **more}).encode()
        request = urllib.request.Request(f"{self.endpoint.url}/chat/completions", body, {HEADER: key})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())["choices"][0]["message"]["content"]


def count(ask):
    """Says numbers until the answer is the next one."""
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": [{"type": "text", "text": "1"}]}]
    while (said := ask(messages)) != "2":
        messages += [{"role": "assistant", "content": said.strip()}, {"role": "user", "content": "no"}]
    return 0.5


@pytest.fixture
def program():
    endpoint = Endpoint(HEADER)
    with ThreadPoolExecutor(64) as pool:
        yield lambda play: Program(endpoint, pool, play)
    endpoint.close()


def test_requests_are_observations(program):
    made = program(count)
    episodes = [made.open(f"key {n}") for n in range(16)]
    assert {episode.reset() for episode in episodes} == {"1"} and episodes[3].instructions == "Count."
    for episode in episodes:
        step = episode.step(" 3 ")
        assert (step.text, step.reward, step.done) == ("no", 0.0, False)
    ends = [episode.step("2") for episode in episodes]
    assert all((end.text, end.reward, end.done) == ("", 0.5, True) for end in ends)


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "messages, more, message",
    [
        ([user("other")], {}, "a request does not continue the conversation"),
        ([user("a"), {"role": "assistant", "content": "x"}], {}, r"adds messages of \[\]"),
        (
            [user("a"), {"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}],
            {},
            r"adds messages of \['tool'\]",
        ),
        (
            [user("a"), {"role": "assistant", "content": "x"}, user([{"type": "image_url"}])],
            {},
            r"has parts of \['image_url'\]",
        ),
        ([user("a"), {"role": "assistant", "content": "x"}, user("b")], {"tools": [{}]}, "offers tools"),
    ],
)
def test_requests_that_are_no_conversation(program, messages, more, message):
    def play(ask):
        ask([user("a")])
        ask(messages, **more)

    episode = program(play).open("k")
    episode.reset()
    with pytest.raises(EnvironmentFault, match=message):
        episode.step("x")
    episode.close()


def test_errors_and_the_end_of_a_program(program):
    with pytest.raises(EnvironmentFault, match="ended before it requested an answer"):
        program(lambda ask: 1.0).open("k").reset()
    with pytest.raises(ZeroDivisionError):
        program(lambda ask: 1 / 0).open("k").reset()
    made = program(count)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        made.ask("unknown", [user("a")])
    codes = []

    def note(ask):
        try:
            ask([user("a")])
        except urllib.error.HTTPError as error:
            codes.append(error.code)

    episode = program(note).open("k")
    episode.reset()
    episode.close()
    episode._program.exception(20)
    assert codes == [410]
    streaming = program(lambda ask: ask([user("a")], stream=True)).open("k")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        streaming.reset()


OWN = """
from concurrent.futures import ThreadPoolExecutor
from itertools import count as numbers
from miles_environments import Environment, Task
from test_conversation import HEADER, Endpoint, Program, count

class Counting(Environment):
    several_turns = True
    def __init__(self, seed):
        self.keys, self.endpoint = numbers(), Endpoint(HEADER)
        self.program = Program(self.endpoint, ThreadPoolExecutor(8), count)
    def task(self, number, level):
        return Task()
    def open(self, number, level):
        return self.program.open(str(next(self.keys)))
    def close(self):
        self.endpoint.close()
"""


def test_a_run_trains_on_the_tokens_of_every_answer(run, scripted, tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    seen = []
    scripted(lambda prompt: seen.append(prompt) or ("2" if "no" in prompt else " 3 "))
    done = run(f"file:{tmp_path / 'counting.py'}:Counting", generate="environments", rollout_batch_size=1)
    assert "Count." in seen[0]
    for sample in done.samples:  # " 3 " as it was generated: the program strips it
        learned = [piece for piece, one in zip(sample["pieces"], sample["loss_mask"], strict=True) if one]
        assert "".join(learned) == " 3 <|end|>2<|end|>"
    assert [s["metadata"]["episode"] for s in done.samples] == [
        {"reward": 0.5, "rewards": [0.0, 0.5], "done": True}
    ] * 2
    assert done.metrics[0]["environments/turns"] == 2
