"""An engine whose answers a test writes, and small environments."""

import shutil

import pytest

from miles_core.engine import Response
from miles_embedded.engine.engine import EmbeddedEngine
from miles_testing import toy_files

OWN = '''
import os, sys, threading, time
from miles_environments import Environment, Episode, Step, Task

class Sums(Environment):
    """Sums of level + 1 terms; the answer "bad..." makes the score fail in some way."""

    levels = 3

    def __init__(self, seed, length=None, answer="text"):
        self.seed, self.length, self.answer = seed, length, answer

    def task(self, number, level):
        if number % 7 == 3:
            raise OSError("no such task")
        return Task(" + ".join([str(self.seed % 5), *[str(number)] * (level + 1)]), self.seed % 5 + number * (level + 1))

    def score(self, number, level, answers):
        (answer,) = answers
        if answer == "bad raise":
            raise ValueError("cannot be read")
        if answer == "bad exit":
            sys.exit(3)
        if answer == "bad block":
            time.sleep(30)
        if answer == "bad nan":
            return [float("nan")]
        if answer == "bad count":
            return []
        print("x" * 1_000_000)
        return [1.0 if answer == str(self.task(number, level).label) else 0.0]

class Novel(Environment):
    """A reward of the whole group."""

    scores_groups = True

    def __init__(self, seed):
        pass

    def task(self, number, level):
        return Task(f"say {number}")

    def score(self, number, level, answers):
        return [{"novelty": 1 / answers.count(answer), "size": len(answers)} for answer in answers]

class Unclear:
    def __bool__(self):
        raise ValueError("the truth value is ambiguous")

class Odd(Exception):
    def __index__(self):
        raise self

    def __str__(self):
        raise KeyError("no message")

class Count(Environment):
    """Episodes: say 1, 2, 3 in order."""

    several_turns = True
    instructions = "Count."
    closed = []

    def __init__(self, seed):
        pass

    def task(self, number, level):
        return Task()

    def open(self, number, level):
        return Counting()

class Counting(Episode):
    def reset(self):
        self.at = 1
        return "start"

    def step(self, action):
        if action.startswith("bad"):
            return {
                "bad raise": lambda: 1 / 0,
                "bad block": lambda: time.sleep(30),
                "bad nan": lambda: Step("", float("nan"), False),
                "bad text": lambda: Step(None, 0.0, False),
                "bad step": lambda: 5,
                "bad size": lambda: Step("", 10**400, False),
                "bad large": lambda: Step("", 1e300, False),
                "bad done": lambda: Step("", 0.0, [Unclear()].pop()),
                "bad error": lambda: [][Odd()],
                "bad half": lambda: Step("half \\ud83d of a pair", 0.0, False),
                "bad fork": lambda: Step("parent" if os.fork() else "child", 0.0, True),
            }[action]()
        right = action == str(self.at)
        self.at += 1
        print("x" * 1_000_000)
        return Step(f"now {self.at}" + "." * 100, float(right), self.at > 3)

    def close(self):
        Count.closed.append(self.at)
'''
#: An environment with Gymnasium's interface, without the library.
GYM = '''
class Guess:
    """Find a number from the hints."""

    levels = 2
    instructions = "Guess."

    def __init__(self, level=0, largest=8):
        self.largest = largest * (level + 1)

    def reset(self, seed=None):
        self.secret = seed % self.largest
        return {"text": f"a number below {self.largest}"}, {}

    def to_action(self, answer):
        return int(answer)

    def step(self, action):
        ended = action == self.secret
        return "right" if ended else "more" if action < self.secret else "less", float(ended), ended, False, {}
'''


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The toy model with a longer context."""
    directory = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(toy_files(max_position_embeddings=2048) / "model", directory)
    return directory


@pytest.fixture
def own(tmp_path):
    """The file with the environments."""
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


@pytest.fixture
def gym(tmp_path, monkeypatch):
    """Name of a module with an environment of Gymnasium's interface."""
    (tmp_path / "guess_env.py").write_text(GYM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "guess_env:Guess"


@pytest.fixture
def scripted(monkeypatch):
    """``scripted(function)``: the engine answers ``function(text of the prompt)``."""

    def use(answer):
        from miles_tools.demo.model import make_tokenizer

        tokenizer = make_tokenizer()

        async def generate(self, request):
            text = answer(tokenizer.decode(request.tokens))
            tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            return Response(tokens, [-1.0] * len(tokens), "stop", text, [(0, self.version)])

        monkeypatch.setattr(EmbeddedEngine, "generate", generate)

    return use


@pytest.fixture
def run(toy_run, checkpoint):
    """``run(environments, **options)``: a toy run on environments."""

    def run(environments, **options):
        given = {
            "hf_checkpoint": checkpoint,
            "prompt_data": None,
            "custom_rm_path": None,
            "environments": environments,
            "apply_chat_template": True,
            "rollout_max_response_len": 64,
            "n_samples_per_prompt": 2,
            "steps": 1,
        }
        return toy_run(**{**given, **options})

    return run
