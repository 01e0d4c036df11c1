"""Adapters with the real libraries, where they are installed."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from miles_core.plugin import ConfigError
from miles_environments.adapters.gymnasium_text import GymEnvironment, GymEpisode, to_text
from miles_environments.entry import read_entry
from miles_environments.libraries import make_environment


def make(text, package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    return make_environment(read_entry(text, "--environments"), 5)


def test_reasoning_gym():
    made = make("reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2", "reasoning_gym")
    task = made.task(10**6, 0)
    assert made.task(10**6, 0) == task and made.length is None
    assert list(made.score(10**6, 0, [task.label, None])) == [1.0, 0.0]
    hard = make("reasoning_gym:chain_sum?curriculum=1", "reasoning_gym")
    lengths = [sum(len(hard.task(n, level).prompt) for n in range(20)) for level in (0, 4, hard.levels - 1)]
    assert lengths == sorted(set(lengths))
    with pytest.raises(ConfigError, match=r"the library refuses it .*'nope' not registered"):
        make("reasoning_gym:nope", "reasoning_gym")


def test_textarena():
    made = make("textarena:GuessTheNumber-v0", "textarena")
    episode = made.open(1, 0)
    first = episode.reset()
    assert "Guess The Number" in first
    steps = [episode.step(f"[{guess}]") for guess in range(1, 11)]
    assert first not in steps[0].text and steps[0].reward == 0.0  # only what is new
    assert any(step.done for step in steps)


def test_gymnasium():
    made = make("gymnasium:FrozenLake-v1?render_mode=ansi&is_slippery=false", "gymnasium")
    episode = made.open(0, 0)
    assert "FFF" in episode.reset()
    assert "whole number from 0 to 3" in episode.step("left").text and not episode.step("I go 2").done
    episode.close()
    with pytest.raises(ConfigError, match="its actions are Box"):
        make("gymnasium:Pendulum-v1", "gymnasium")


def test_a_discrete_action_is_compared_as_a_whole():
    class Discrete:
        n = 4

    class Game:
        action_space = Discrete()

        def reset(self, seed):
            return "start", {}

        def step(self, action):
            return str(action), 0.0, False, False, {}

    episode = GymEpisode(Game, seed=0)
    episode.reset()
    assert episode.step("take 0000000003").text == "3"
    for action in ("-0000000012", "0000000005", "4", "9" * 5000, "left"):
        assert "whole number from 0 to 3" in episode.step(action).text, action


def test_verifiers(tmp_path, monkeypatch):
    pytest.importorskip("verifiers", reason="verifiers is not installed")
    (tmp_path / "their_sums.py").write_text(
        "import verifiers.v1 as vf\nclass Data(vf.TaskData):\n    answer: str\n"
        "class Sum(vf.Task[Data]):\n"
        "    @vf.reward(weight=2.0)\n    async def right(self, trace: vf.Trace) -> float:\n"
        "        return float(trace.last_reply.strip() == self.data.answer)\n"
        "class Sums(vf.Taskset[Sum]):\n    def load(self):\n"
        "        return [Sum(Data(prompt=f'{i}+1?', answer=str(i + 1), system_prompt='Add.'), self.config.task) for i in range(4)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = make("verifiers:their_sums:Sums", "verifiers")
    assert made.length == 4 and made.task(3, 0).prompt == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "3+1?"},
    ]
    assert made.score(3, 0, ["4", "5", None]) == [2.0, 0.0, 0.0]


class EchoClient:
    """A stand-in for OpenEnv's client and its server: the interface of openenv 0.10.0."""

    log: ClassVar[list[Any]] = []

    def __init__(self, base_url):
        self.log.append(base_url)

    def sync(self):
        return self

    def connect(self):
        self.log.append("connect")

    def reset(self, seed):
        return SimpleNamespace(observation={"echo": f"seed {seed}", "text": "other"}, reward=None, done=False)

    def step(self, action):
        self.log.append(action)
        return SimpleNamespace(observation={"echo": action["say"]}, reward=0.5, done=action["say"] == "end")

    def close(self):
        self.log.append("close")


def test_openenv_with_a_stand_in(monkeypatch):
    for name in ("openenv", "openenv.core", "openenv.core.generic_client"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["openenv"], "core", sys.modules["openenv.core"], raising=False)
    client = sys.modules["openenv.core.generic_client"]
    monkeypatch.setattr(sys.modules["openenv.core"], "generic_client", client, raising=False)
    monkeypatch.setattr(client, "GenericEnvClient", EchoClient, raising=False)
    monkeypatch.setattr(EchoClient, "log", [])
    made = make_environment(read_entry("openenv:http://127.0.0.1:8000?action=say&observation=echo", "x"), 5)
    episode = made.open(3, 0)
    assert episode.reset() == "seed 5000018"
    first, last = episode.step("hello"), episode.step("end")
    episode.close()
    assert (first.text, first.reward, first.done, last.done) == ("hello", 0.5, False, True)
    assert EchoClient.log == ["http://127.0.0.1:8000", "connect", {"say": "hello"}, {"say": "end"}, "close"]


def test_the_interface_of_gymnasium_without_the_library(gym):
    made = GymEnvironment(read_entry(f"gymnasium:{gym}?largest=4", "x"), 5)
    assert made.levels == 2 and made.instructions == "Guess."
    episode = made.open(3, 1)
    assert episode.reset() == "a number below 8"
    secret = (5 * 1_000_003 + 3) % 8
    assert not episode.step(str(secret + 1)).done
    assert episode.step(str(secret)).reward == 1.0
    episode.close()
    with pytest.raises(ConfigError, match="the module guess_env has no class 'Nothing'"):
        GymEnvironment(read_entry("gymnasium:guess_env:Nothing", "x"), 5)


def test_observations_as_text():
    assert [to_text(o) for o in ("a", {"text": "b"}, {"x": 1}, [1.5])] == ["a", "b", '{"x": 1}', "[1.5]"]
