"""Which answers a label accepts: numbers match numbers, and what no response equals is refused."""

import datetime
from decimal import Decimal

import numpy as np
import pytest

from miles_core.errors import DataError
from miles_core.reward.labels import answers_of, read_number, text_of
from miles_core.reward.text_rules import boxed, exact, f1


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("2", ["2", " 2\n"], ["2.0", "two", ""]),
        ("2.0", ["2.0"], ["2"]),
        (2, ["2", "2.0", "+2", "2.", "2e0", "02"], ["3", "2.01", "two", "2 3", ""]),
        (2.0, ["2", "2.0", "2.00"], ["20", "2.5"]),
        (0.1, ["0.1", ".1", "1e-1", "0.10"], ["0.10000000001", "1"]),
        (-0.0, ["0", "-0", "0.0"], ["1"]),
        (1e22, ["1e22", "1E+22", "10000000000000000000000"], ["1e21", "22"]),
        (1e-7, ["1e-7", "0.0000001"], ["0", "1"]),
        (10**30, ["1" + "0" * 30, "1e30"], ["1e31"]),
        (Decimal("2.00"), ["2", "2.0"], ["200"]),
        (True, ["True", "true", "TRUE"], ["1", "False", "yes"]),
        (False, ["false"], ["0", "true"]),
        (["2", 3.0], ["2", "3"], ["2.0", "4"]),
        (("a", None), ["a"], ["None"]),
        (np.int64(2), ["2", "2.0"], ["3"]),
        (np.float32(0.1), ["0.1"], ["0.10000000149011612"]),
        (np.float64(2.0), ["2"], ["3"]),
        (np.bool_(True), ["true"], ["1"]),
        (np.array([1, 2]), ["1", "2.0"], ["3"]),
        (np.array(["a", "b"]), ["b"], ["c"]),
        (np.array(2.0), ["2"], ["3"]),
        (b"caf\xc3\xa9", ["café"], ["b'caf'"]),
        (datetime.date(2024, 1, 31), ["2024-01-31"], ["31"]),
    ],
)
def test_exact_and_boxed_accept(label, right, wrong):
    assert [exact(answer, label) for answer in right] == [1.0] * len(right)
    assert [boxed(rf"so \boxed{{{answer}}}", label) for answer in right] == [1.0] * len(right)
    assert [exact(answer, label) for answer in wrong] == [0.0] * len(wrong)
    assert [boxed(rf"so \boxed{{{answer}}}", label) for answer in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (
            {"ground_truth": "2", "style": "rule"},
            "a mapping with the entries 'ground_truth', 'style'; name the one .*--label-key KEY.ENTRY",
        ),
        ({}, r"{} \(dict\)"),
        ([{"a": 1}], "a mapping"),
        ([["1", "2"]], r"\['1', '2'\] \(list\), which no response equals; store a text, a number or a list"),
        (float("nan"), r"holds nan \(float\)"),
        (float("inf"), r"holds inf \(float\)"),
        (b"\xff", "bytes that are not UTF-8"),
        (1 + 2j, r"\(complex\)"),
        (np.eye(2), r"\(ndarray\)"),
        (None, "nothing to compare with"),
        ("", "nothing to compare with"),
        (["", None], "nothing to compare with"),
        ([], "nothing to compare with"),
    ],
)
@pytest.mark.parametrize("rule", [exact, boxed, f1])
def test_labels_that_no_response_equals(rule, label, message):
    with pytest.raises(DataError, match=message):
        rule("2", label)


def test_numbers_and_their_texts():
    assert [text_of(answer) for answer in answers_of([2.0, 1e22, 1e-7, 100, "x", True])] == [
        "2", "1" + "0" * 22, "0.0000001", "100", "x", "True",
    ]  # fmt: skip
    assert read_number("1e999999999") == Decimal("1e999999999") and read_number("1e9999999999") is None
    assert read_number("٣") is None and read_number("1_0") is None and read_number("1 0") is None


def test_the_reasoning_of_a_response_is_no_answer():
    thought = "<think>maybe \\boxed{7} or 7</think>\n"
    assert [exact(thought + "4", "4"), exact(thought, "7"), exact("7</think>4", "4")] == [1.0, 0.0, 1.0]
    assert [boxed(thought + r"\boxed{4}", "4"), boxed(thought + "4", "7"), boxed(r"<think> \boxed{7}", "7")] == [
        1.0,
        0.0,
        0.0,
    ]
    assert f1(thought + "a cat", "cat") == 1.0
    assert boxed(r"[THINK]\boxed{7}[/THINK]\boxed{4}", "7") == boxed(r"<seed:think>\boxed{7}", "7") == 0.0
