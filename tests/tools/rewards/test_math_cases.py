r"""The rules of the reward ``math``, and pairs of label and response that math-verify's tests judge.

``math_verify_cases.jsonl`` holds label, response and verdict of short cases of math-verify's own tests (github.com/huggingface/Math-Verify,
commit 5d148cf, MIT license), with default options.
"""

import json
import time
from pathlib import Path

import pytest

from miles_core.errors import DataError
from miles_tools.rewards.math_answer import compare_numbers, read_answer
from miles_tools.rewards.math_verifier import MathVerifier, check_math_label

CASES = [json.loads(line) for line in Path(__file__).with_name("math_verify_cases.jsonl").open(encoding="utf-8")]


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(workers=1)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(("label", "response", "equal"), CASES)
def test_cases_of_math_verify(verifier, label, response, equal):
    assert verifier(response, label) == equal
    assert verifier.failures == 0


@pytest.mark.parametrize(
    ("label", "response"),
    [
        ("42", r"\fbox{42}"),
        ("7", r"1, so \framebox{7} as 3"),
        ("7", r"1, so \framebox[2cm][c]{7} as 3"),
        ("42", r"\boxed 42"),
        ("12", r"\boxed{12.}"),
        ("12", r"\boxed{ 12. }"),
        ("2000", r"\boxed{2\cdot 10^3.}"),
        ("1000", r"\boxed{1e3}"),
        ("1000", "The answer is 1e3."),
        (1e3, r"\boxed{1000}"),
        ("0.0015", r"\boxed{1.5e-3}"),
        (1e-7, r"\boxed{10^{-7}}"),
        ("1000", r"\boxed{1\,000}"),
        ("1000", r"\boxed{1 000}"),
        ("1000", r"\boxed{\$1{,}000.00}"),
        ("7", r"\boxed{\mathbf{7}}"),
        ("1/2", r"\boxed{.5}"),
        ("0.333333", r"\boxed{1/3}"),
        ("0.333333", r"\boxed{.3333333}"),
        ("12", r"\boxed{12\text{ cm}}"),
        ("28%", r"\boxed{28}\%"),
        (r"\{1, 2\}", r"\boxed{1} and \boxed{2}"),
        ("4", r"\boxed{4}, that is \boxed{4}"),
        ("4", r"first \boxed{3}, so the answer is \boxed{4}"),
        ("5", r"\boxed{x = 5}"),
        (r"\begin{pmatrix}1/2\\1\end{pmatrix}", r"\boxed{\begin{pmatrix}0.5\\1\end{pmatrix}}"),
        ("7", r"<think>it may be \boxed{42}</think> The answer is 7."),
        ("7", r"it may be \boxed{42}</think>\boxed{7}"),
        ("10455", r"\boxed{255} and so on. Final Answer: The final answer is $10,455$. I hope it is correct."),
    ],
)
def test_right_answers(verifier, label, response):
    assert verifier(response, label) == 1.0


@pytest.mark.parametrize(
    ("label", "response"),
    [
        ("1/3", r"\boxed{.333333}"),
        (r"\frac13", r"\boxed{0.33}"),
        (r"\sqrt2", r"\boxed{1.4142136}"),
        (r"\pi", r"\boxed{3.14159}"),
        ("0.3333", r"\boxed{1/3}"),
        ("2.0", r"\boxed{2.04}"),
        (1e-7, r"\boxed{2e-7}"),
        ("42", r"<think>it may be \boxed{42}</think> The answer is 7."),
        ("42", r"<think>it may be \boxed{42}"),
        ("42", r"42 is wrong, it is \boxed{7}"),
        ("42", r"\boxed{what} 42"),
        ("3", r"first \boxed{3}, so the answer is \boxed{4}"),
        ("0", r"\boxed{1\,000}"),
        ("42", r"\boxed{}"),
        ("42", ""),
    ],
)
def test_wrong_answers(verifier, label, response):
    assert verifier(response, label) == 0.0


def test_a_truth_value_is_compared_by_name(verifier):
    assert [verifier(text, True) for text in (r"\boxed{true}", r"\boxed{\text{True}}", r"\boxed{1}")] == [1.0, 1.0, 0.0]


def test_numbers_of_any_size_need_no_process():
    assert compare_numbers("1e400", "1" + "0" * 400) is True
    assert compare_numbers("9" * 50, "9" * 49 + "8") is False
    assert compare_numbers("1e999999999", "0.5") is False
    assert compare_numbers("0.5000001", "0.5") is True and compare_numbers("0.500001", "0.5") is False
    assert compare_numbers("x", "1") is None


@pytest.mark.parametrize(
    "text", [r"\boxed{" * 50_000 + "}" * 50_000, r"\boxed{1}," * 50_000, "1" * 200_000, "1," * 100_000 + "x"]
)
def test_long_answers_take_no_time(text):
    before = time.process_time()
    answer, _ = read_answer(text)
    compare_numbers(answer, "1")
    assert time.process_time() - before < 2


def test_the_text_of_a_json_object_is_no_label():
    check_math_label(r"{1, 2}")
    for label in ('{"ground_truth": "2"}', ["1", '{"a": 1}'], {"ground_truth": "2"}):
        with pytest.raises(DataError, match=r"a mapping with the entries .*--label-key KEY\.ENTRY"):
            check_math_label(label)
