import asyncio
import os
import signal
import threading

import pytest

from miles_core.data.sample import Sample
from miles_core.errors import DataError
from miles_tools.rewards.math_verifier import MathVerifier, make_reward


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(workers=1)
    yield verifier
    verifier.close()


def test_equal_texts_and_integers_need_no_process():
    verifier = MathVerifier()
    assert verifier("so \\boxed{x+1}", "$x+1$") == 1.0
    assert verifier("\\boxed{007}", 7) == 1.0
    assert verifier("41", "42") == 0.0
    assert verifier(None, "42") == 0.0
    assert verifier._idle.get_nowait() is None
    with pytest.raises(DataError, match="--label-key"):
        verifier("42", None)


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        (r"The answer is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("$1+x^2$", "x^2+1", 1.0),
        ("I get 7 + 5 = 12.", "12", 1.0),
        ("I get 7 + 5 = 13.", "12", 0.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        ("no idea", "12", 0.0),
        ("12", ["11", "12.0"], 1.0),
    ],
)
def test_against_math_verify(verifier, response, label, value):
    assert verifier(response, label) == value


def test_from_many_threads(verifier):
    results = {}

    def ask(i):
        results[i] = verifier(f"the sum is ${i}+1$ so $\\boxed{{{i}+1}}$", f"{i + 1}.0")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), 1.0)


def test_past_the_deadline_scores_zero_is_counted_and_the_next_one_works(caplog):
    verifier = MathVerifier(workers=1, deadline=20)
    assert verifier("$2/4$", "1/2") == 1.0
    worker = verifier._idle.get()
    os.kill(worker._process.pid, signal.SIGSTOP)
    verifier._idle.put(worker)
    verifier.deadline = 0.05
    assert verifier("$3/6$", "1/2") == 0.0
    assert verifier.failures == 1
    assert "no verdict within 0.05 s" in caplog.text
    verifier.deadline = 20
    assert verifier("$4/8$", "1/2") == 1.0
    verifier.close()


def test_a_process_that_was_killed_is_replaced(verifier):
    worker = verifier._idle.get()
    if worker is not None:
        worker._process.kill()
        worker._process.wait()
    verifier._idle.put(worker)
    before = verifier.failures
    assert verifier("$3/6$", "1/2") == 0.0
    assert verifier.failures == before + 1
    assert verifier("$3/6$", "1/2") == 1.0


def test_the_reward_named_math_scores_samples_without_starting_a_process():
    reward = make_reward(run=None)
    right, wrong = (Sample(label="4", response=text) for text in (r"\boxed{4}", r"\boxed{5}"))
    assert [asyncio.run(reward(None, sample)) for sample in (right, wrong)] == [1.0, 0.0]
    assert make_reward.check_label
