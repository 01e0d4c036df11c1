"""Environments in real runs: rewards, episodes, failures, curricula, evaluation, and resume."""

import asyncio
import re

import pytest

from miles_core.api import samples
from miles_core.plugin import ConfigError, DataError


def sum_of(text):
    """The right answer to the last question of ``Sums``."""
    return str(sum(map(int, re.findall(r"\d+(?: \+ \d+)*", text)[-1].split(" + "))))


def test_single_answers_are_scored(run, own, scripted):
    scripted(sum_of)
    done = run(f"file:{own}:Sums")
    metrics = done.metrics[0]
    assert metrics["environments/Sums/reward"] == metrics["reward/mean"] == 1.0
    assert metrics["environments/Sums/rollouts"] == 4 and metrics["environments/masked"] == 0
    assert done.samples[0]["metadata"]["environment"] == {"label": "Sums", "number": 0, "level": 0}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("bad raise", "raised ValueError: cannot be read"),
        ("bad exit", "raised RuntimeError: SystemExit: 3"),
        ("bad block", "took longer than 0.2 seconds"),
        ("bad nan", "returned the reward nan"),
        ("bad count", "returned 0 rewards for 1 answers"),
    ],
)
def test_an_answer_that_cannot_be_scored_is_masked(run, own, scripted, caplog, answer, reason):
    answers = iter([answer, "5", "0", "0"] * 9)
    scripted(lambda text: next(answers))
    done = run(f"file:{own}:Sums", environment_seconds=0.2)
    removed = [sample for sample in done.samples if sample["removed"]]
    assert len(removed) == 1 and done.metrics[0]["environments/masked"] == 1
    assert f"sample {removed[0]['index']} is masked: " in caplog.text and reason in caplog.text
    others = [s["reward"] for s in done.samples if s["group"] == removed[0]["group"] and not s["removed"]]
    assert removed[0]["reward"] == others[0]  # the mean, so that the advantage of the others stays


@pytest.mark.parametrize("most", [1, 2])
def test_as_many_environments_are_called_at_once_as_configured(run, own, scripted, monkeypatch, most):
    running, seen = 0, []

    async def call(function, name):
        nonlocal running
        running += 1
        seen.append(running)
        await asyncio.sleep(0.01)
        running -= 1
        return function()

    monkeypatch.setattr("miles_environments.threads.call_in_thread", call)
    scripted(sum_of)
    run(f"file:{own}:Sums", environment_concurrency=most)
    assert max(seen) == most


def test_a_reward_of_the_group(run, own, scripted):
    answers = iter(["a", "a", "b", "a"] * 9)
    scripted(lambda text: next(answers))
    done = run(f"file:{own}:Novel", reward_key="novelty", n_samples_per_prompt=4, rollout_batch_size=1)
    assert [s["reward"]["size"] for s in done.samples] == [4] * 4
    assert sorted(s["reward"]["novelty"] for s in done.samples) == pytest.approx([1 / 3] * 3 + [1])


def test_a_dict_of_rewards_without_a_key(run, own, scripted):
    scripted(lambda text: "a")
    with pytest.raises(DataError, match="name the one to train on with --reward-key"):
        run(f"file:{own}:Novel")


def test_episodes(run, own, scripted, capsys):
    seen = []

    def answer(text):
        seen.append(text)
        return "1" if "now" not in text else "2" if "now 3" not in text else "7"

    scripted(answer)
    done = run(f"file:{own}:Count", generate="environments", environment_chars=20)
    metrics = done.metrics[0]
    assert (
        metrics["reward/mean"] == 2.0 and metrics["environments/turns"] == 3 and metrics["environments/finished"] == 1
    )
    for sample in done.samples:
        assert sample["metadata"]["episode"] == {"reward": 2.0, "rewards": [1.0, 1.0, 0.0], "done": True}
        mask = sample["loss_mask"]
        learned = "".join(piece for piece, one in zip(sample["pieces"], mask, strict=True) if one)
        assert learned == "1<|end|>2<|end|>7<|end|>" and sample["prompt"][1]["content"] == "start"
    assert "[85 more characters were cut]" in seen[-1] and "Count." in seen[0]
    assert "xxxx" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("bad raise", "raised ZeroDivisionError"),
        ("bad block", "took longer than 0.3 seconds (--environment-seconds)"),
        ("bad nan", "the reward that step returned is nan"),
        ("bad text", "the observation is None"),
        ("bad step", "step returned 5"),
        ("bad size", "the reward that step returned is an integer with hundreds of digits"),
        ("bad large", "the reward that step returned is 1e+300; a reward must be between"),
        ("bad done", "it is True or False"),
        ("bad error", "raised Odd (its message cannot be read)"),
    ],
)
def test_an_episode_that_fails_costs_its_sample(run, own, scripted, caplog, action, reason):
    answers = iter([action, "1", "1", "1", *["2"] * 50])
    scripted(lambda text: next(answers))
    done = run(f"file:{own}:Count", generate="environments", environment_seconds=0.3)
    assert len(done.samples) == 3 and done.metrics[0]["environments/failed_episodes"] == 0.25
    assert reason in caplog.text and "fails: the environment Count, task 0" in caplog.text


@pytest.mark.parametrize("chat", [True, None])
def test_half_a_surrogate_pair_in_an_observation(run, own, scripted, chat):
    scripted(lambda text: "bad half" if "half" not in text else "1")
    done = run(f"file:{own}:Count", generate="environments", apply_chat_template=chat)
    assert len(done.samples) == 4 and done.metrics[0]["environments/failed_episodes"] == 0
    assert all("half" in "".join(sample["pieces"]) for sample in done.samples)


def test_a_fork_of_an_environment_does_not_go_on(run, own, scripted):
    scripted(lambda text: "bad fork")
    done = run(f"file:{own}:Count", generate="environments")
    assert len(done.samples) == 4 and done.metrics[0]["environments/finished"] == 1


def test_turn_limits_and_texts_without_a_chat_template(run, own, scripted):
    scripted(lambda text: "1")
    done = run(f"file:{own}:Count?turns=2", generate="environments", apply_chat_template=None)
    assert {s["status"] for s in done.samples} == {"truncated"} and done.metrics[0]["environments/turns"] == 2


def test_gymnasium_interface_mixed_with_single_answers(run, own, gym, scripted):
    """Levels become arguments; an answer that is no number fails the sample only."""
    scripted(lambda text: sum_of(text) if "below" not in text else "0" if "more" not in text else "1")
    done = run(f"gymnasium:{gym}?level=1&turns=3,file:{own}:Sums", generate="environments", rollout_batch_size=6)
    labels = {s["metadata"]["environment"]["label"] for s in done.samples}
    assert labels == {"Guess", "Sums"} and "environments/Guess/level" in done.metrics[0]
    guess = [s for s in done.samples if s["metadata"]["environment"]["label"] == "Guess"]
    assert all("a number below 16" in s["prompt"][1]["content"] for s in guess)


def test_curriculum_and_resume(run, own, scripted, tmp_path):
    scripted(sum_of)
    mix = f"file:{own}:Sums?curriculum=1&window=4"
    whole = run(mix, steps=3)
    assert [m["environments/Sums/level"] for m in whole.metrics] == [0, 1, 2]
    run(mix, steps=2, directory=tmp_path / "half")
    rest = run(mix, steps=3, directory=None, save=None, load=tmp_path / "half")
    assert rest.metrics[-1]["environments/Sums/level"] == 2
    last = len(whole.samples) // 3
    assert [s["prompt"] for s in rest.samples[-last:]] == [s["prompt"] for s in whole.samples[-last:]]


def test_evaluation(run, own, scripted):
    scripted(sum_of)
    done = run(
        f"file:{own}:Sums",
        eval_environments=f"file:{own}:Sums?first=4&count=2,file:{own}:Novel",
        eval_environments_size=6,
        eval_prompts="environments",
        eval_prompt_data="all=,sums=Sums",
        reward_key="novelty",
        eval_interval=1,
    )
    metrics = done.metrics[-1]
    assert (
        metrics["eval/sums/reward"] == 1.0
        and metrics["eval/all/Sums/reward"] == 1.0
        and metrics["eval/all/Novel/reward"] == 1.0
    )
    assert metrics["environments/Sums/rollouts"] == 4  # held-out ones do not count
    with pytest.raises(ConfigError, match="there is no environment 'x'; there are Sums"):
        run(f"file:{own}:Sums", eval_prompts="environments", eval_prompt_data="all=x", eval_interval=1)


@pytest.mark.parametrize("size", [3, 5])
def test_each_evaluation_has_the_tasks_of_the_option(run, own, scripted, size):
    scripted(sum_of)
    options = {"eval_prompts": "environments", "eval_prompt_data": "sums=Sums", "eval_interval": 1}
    done = run(f"file:{own}:Sums", eval_environments_size=size, reward_key="novelty", **options)
    assert len(list(samples(done.directory, "eval", 1))) == size


def test_an_environment_with_episodes_needs_its_rollout_function(run, own):
    with pytest.raises(ConfigError, match="Count has episodes of several turns; give --generate environments"):
        run(f"file:{own}:Count")
