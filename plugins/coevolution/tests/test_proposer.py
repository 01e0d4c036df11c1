"""Proposer against solver: what counts as a task, how both are scored, and the verifiers of reasoning-gym."""

import asyncio

import pytest
import torch

from miles_coevolution import proposer
from miles_coevolution.game import ENTRY, group_attempts
from miles_coevolution.proposer import TASKS, ProposerGame, TaskPrompts, make_prompts, make_question, parse
from miles_core.contracts.engine import Response, Sampling
from miles_core.data import Sample
from miles_core.plugin import ConfigError
from miles_core.rollout.function import GenerationClient
from miles_core.trainer import ALGORITHMS, AdvantageInputs
from miles_testing import PromptSourceContract
from miles_tools.demo.model import make_tokenizer

TOKENIZER = make_tokenizer()


class Sum:
    """A question with a known answer."""

    text = "1 + 1 =\nAnswer: "

    def score(self, answer):
        return float(answer.strip() == "2")


@pytest.fixture
def questions(monkeypatch):
    asked = []
    monkeypatch.setattr(proposer, "make_question", lambda *what: asked.append(what) or Sum())
    return asked


def play(answers, attempts=4):
    """One game in which the proposer and the solver give these answers; the plays, the requests and the metrics."""
    requests, answers = [], iter(answers)

    async def generation(tokens, sampling, policy, media=()):
        requests.append((policy, TOKENIZER.decode(tokens)))
        text = next(answers)
        ids = TOKENIZER.encode(text)
        return Response(ids, [-1.0] * len(ids), "stop", text, [(0, 0)])

    sample = Sample(prompt="Task: ", tokens=TOKENIZER.encode("Task: "), index=5)
    ask = GenerationClient(sample, "p", generation, Sampling(8), TOKENIZER, None, TOKENIZER.decode)
    made = ProposerGame(attempts).play(sample, ask, {"proposer": "p", "solver": "s"})
    return asyncio.run(made), requests, ask.metrics


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a2", ("a", 2)),
        (" c 9 and", ("c", 9)),
        ("a5", None),
        ("z1", None),
        ("a12", None),
        ("a0", None),
        ("2a", None),
        ("", None),
    ],
)
def test_a_task_is_a_letter_and_a_level(text, found):
    assert parse(text) == found


@pytest.mark.parametrize(("right", "score"), [(0, 0.0), (1, 0.75), (2, 1.0), (3, 0.75), (4, 0.0)])
def test_the_proposer_is_rewarded_for_tasks_that_are_solved_sometimes(questions, right, score):
    (one, *solvers), requests, metrics = play(["a1", *["2"] * right, *["3"] * (4 - right)])
    assert questions == [("a", 1, 5)]
    assert (one.role, one.score, one.win) == ("proposer", score, 1 - right / 4)
    assert sorted(each.score for each in solvers) == sorted([1.0] * right + [0.0] * (4 - right))
    assert requests == [("p", "Task: "), *[("s", Sum.text)] * 4]
    assert metrics == {"proposer/valid": 1.0, "proposer/solved": right / 4, "proposer/level": 1.0}


def test_text_that_is_no_task_has_no_question(questions):
    (one, other), requests, metrics = play(["what?"])
    assert (one.score, other.role, other.turns) == (0.0, "solver", []) and len(requests) == 1 and not questions
    assert metrics == {"proposer/valid": 0.0}


def attempts_at(rollout, scores, group=0):
    entries = [{"role": "solver", "score": score, "win": score, "past": False, "attempt": True} for score in scores]
    return [Sample(group_index=group, rollout_id=rollout, reward=e["score"], metadata={ENTRY: e}) for e in entries]


def test_attempts_are_compared_with_others_at_the_same_task():
    never, easy, hard = attempts_at(4, [0.0, 0.0]), attempts_at(5, [1.0, 1.0, 0.0]), attempts_at(6, [0.0, 0.0, 1.0])
    no_task = Sample(group_index=0, rollout_id=7, reward=0.0, metadata={ENTRY: {"score": 0.0}})
    samples = [*never, no_task, *easy, *hard]
    made = group_attempts(samples)
    group, rollout = (torch.tensor([getattr(one, name) for one in made]) for name in ("group_index", "rollout_id"))
    rewards, ones = torch.tensor([one.reward for one in made]).double(), torch.ones(len(made), dtype=torch.int64)
    scores = ALGORITHMS["dr_grpo"](AdvantageInputs(rewards, group, rollout, ones, ones)).tolist()
    assert scores[:3] == [0.0] * 3
    assert scores[3:] == pytest.approx([1 / 3, 1 / 3, -2 / 3, -1 / 3, -1 / 3, 2 / 3])
    assert [(one.group_index, one.rollout_id) for one in samples[:3]] == [(0, 4), (0, 4), (0, 7)]  # unchanged


def test_games_without_attempts_keep_their_groups():
    samples = [Sample(group_index=3, rollout_id=8), Sample(group_index=3, rollout_id=8)]
    assert [(one.group_index, one.rollout_id) for one in group_attempts(samples)] == [(3, 8), (3, 8)]


class TestPrompt(PromptSourceContract):
    def make(self):
        return TaskPrompts()


def test_held_out_data_is_a_number(monkeypatch):
    with pytest.raises(ConfigError, match="questions per level as data, got 'x'"):
        make_prompts(None, "x", "evaluation")


def test_every_task_has_an_exact_verifier():
    pytest.importorskip("reasoning_gym")
    for letter, task in TASKS.items():
        for level in (1, task.levels):
            question = make_question(letter, level, 3)
            answer = str(question.entry["answer"])
            assert question.score(f" {answer}\n") == 1.0 and question.score(f"{answer}7") == question.score("") == 0.0
            assert make_question.__wrapped__(letter, level, 3).text == question.text
    assert make_question("a", 4, 3).text != make_question("a", 4, 4).text


def test_a_run_of_both(toy_run, tmp_path):
    pytest.importorskip("reasoning_gym")
    (tmp_path / "run.yaml").write_text("policies: {proposer: {}, solver: {}}")
    options = {
        "generate": "proposer",
        "prompts": "tasks",
        "rm_type": "game",
        "custom_rm_path": None,
        "prompt_data": None,
    }
    held_out = {"eval_prompts": "tasks", "eval_prompt_data": "1", "eval_interval": 1}
    done = toy_run(["coevolution"], config=tmp_path / "run.yaml", steps=1, **options, **held_out)
    assert 0 <= done.metrics[-1]["proposer/valid"] <= 1
    assert [record["step"] for record in done.metrics if "eval/reward" in record] == [0, 1]
