"""Environments of verifiers with several turns, played with the real package."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from miles_core.plugin import ConfigError
from miles_environments.entry import read_entry
from miles_environments.environment import EnvironmentFault
from miles_environments.libraries import make_environment

GUESS = """
import verifiers.v1 as vf

__all__ = ["Numbers", "Guessing"]

class Data(vf.TaskData):
    answer: int

class Number(vf.Task[Data]):
    @vf.stop
    async def given_up(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0 and trace.last_reply.strip() == "stop"

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))

class Numbers(vf.Taskset[Number]):
    def load(self):
        return [Number(Data(system_prompt="Guess.", answer=n), self.config.task) for n in range(3)]

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    bonus: float = 0.0

class Guessing(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as game:
            said = "a number below 3"
            while True:
                guess = await game.turn(said)
                if guess.terminated or guess.last_reply == str(task.data.answer):
                    return
                if guess.last_reply == "crash":
                    raise RuntimeError("the table broke")
                said = f"not {guess.last_reply or 'nothing'}"

    async def finalize(self, task, episode):
        if self.config.bonus:
            episode.traces[0].record_reward("bonus", self.config.bonus)
"""
PLAIN = """
import verifiers.v1 as vf
from their_guess import Data, Number
__all__ = ["Plain"]
class Plain(vf.Taskset[Number]):
    def load(self):
        return [Number(Data(prompt="1 or 2?", answer=2), self.config.task)]
"""
TOOLS = (
    PLAIN
    + """
class Search(vf.Toolset):
    pass
class WithTools(Number):
    @classmethod
    def toolsets(cls, config):
        return [Search(vf.ToolsetConfig())]
class Plain(vf.Taskset[WithTools]):
    def load(self):
        return []
"""
)


@pytest.fixture
def make(tmp_path, monkeypatch):
    pytest.importorskip("verifiers", reason="verifiers is not installed")
    for name, text in (("their_guess", GUESS), ("their_plain", PLAIN), ("their_tools", TOOLS)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(text):
        given = text if isinstance(text, dict) else f"verifiers:{text}"
        made.append(make_environment(read_entry(given, "--environments"), 5))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def test_an_environment_of_verifiers_plays_its_own_episode(make):
    made = make("their_guess?bonus=0.5")
    assert made.several_turns and made.length == 3 and made.task(1, 0).label == 1
    episode = made.open(1, 0)
    assert episode.reset() == "a number below 3" and episode.instructions == "Guess."
    wrong, empty, right = (episode.step(action) for action in ("0", "", "1"))
    episode.close()
    assert [(step.text, step.reward, step.done) for step in (wrong, empty, right)] == [
        ("not 0", 0.0, False),
        ("not nothing", 0.0, False),
        ("", 2.5, True),
    ]


def test_stops_and_limits_end_an_episode(make):
    made = make("their_guess?turns=2")
    given_up, limited = made.open(2, 0), made.open(2, 0)
    for episode in (given_up, limited):
        episode.reset()
    assert given_up.step("stop").done
    assert not limited.step("0").done and limited.step("1").done


def test_one_answer_without_an_env_class(make):
    episode = make("their_plain").open(0, 0)
    assert episode.reset() == "1 or 2?"
    step = episode.step("2")
    assert (step.reward, step.done) == (2.0, True)


class User(BaseHTTPRequestHandler):
    """The model of a simulated user: asks, and ends the conversation after the second answer."""

    def do_POST(self):
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        said = {2: "Which one is it?", 4: "Are you sure?", 6: "###DONE###"}[len(messages)]
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        named = {"id": "user", "object": "chat.completion", "created": 0, "model": "user"}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({**named, "choices": [choice]}).encode())

    def log_message(self, *args):
        pass


def test_another_agent_has_its_own_model(make):
    server = HTTPServer(("127.0.0.1", 0), User)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    user = {"model": "user", "client": {"type": "eval", "base_url": f"http://127.0.0.1:{server.server_port}/v1"}}
    options = {"id": "user-sim", "policy": "assistant", "user": user}
    episode = make({"name": "verifiers", "task": "their_plain", "options": options}).open(0, 0)
    assert episode.reset() == "Which one is it?"
    assert episode.step("1").text == "Are you sure?"
    end = episode.step("2")
    assert (end.reward, end.done) == (2.0, True)
    server.shutdown()
    server.server_close()


def test_many_episodes_at_once(make):
    made = make("their_guess")

    def play(number):
        episode = made.open(number % 3, 0)
        episode.reset()
        steps = [episode.step(str(guess)) for guess in range(number % 3 + 1)]
        episode.close()
        return [step.reward for step in steps]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(play, range(48))) == [[0.0] * (n % 3) + [2.0] for n in range(48)]
    assert not made._endpoint.conversations


def test_failures_are_of_the_episode(make):
    made = make("their_guess")
    episode = made.open(1, 0)
    episode.reset()
    with pytest.raises(EnvironmentFault, match=r"verifiers reports EnvError: .*the table broke"):
        episode.step("crash")
    closed = made.open(1, 0)
    closed.reset()
    closed.close()
    assert made.open(1, 0).reset() == "a number below 3"


def test_refused_environments(make):
    for text, message in (
        ("their_guess?policy=user", "policy is 'user'; it must be one of the agents player"),
        ("their_plain?id=user-sim", "policy is None; it must be one of the agents assistant, user"),
        (
            "their_plain?id=user-sim&policy=assistant",
            "its agent user is not the policy; give user.model and user.client",
        ),
        ('their_guess?player={"model":"m"}', "player.model has no effect, because the run plays this agent"),
        ("their_tools", "its tasks have tools, and the answers here are texts"),
        ("their_nothing", "taskset 'their_nothing' not found"),
        ("their_guess?nope=1", r"refuses the options \(nope: Extra inputs are not permitted\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(text)
