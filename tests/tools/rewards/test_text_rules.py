import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.sample import Sample
from miles_core.errors import DataError
from miles_core.reward.reward import RewardFunction, score
from miles_core.reward.text_rules import boxed, exact, f1, last_boxed, make_boxed, make_exact, make_f1


def test_exact_ignores_white_space_only():
    assert exact("  4\n2 ", "4 2") == 1.0
    assert exact("Forty", "forty") == 0.0
    assert exact("42", 42) == 1.0
    assert exact("b", ["a", "b"]) == 1.0


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {x_{1_{2}}}", "x_{1_{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{3} and \boxed{unclosed", "3"),
        (r"{} } \boxed{}", ""),
        ("no box", None),
        ("", None),
    ],
)
def test_last_boxed(text, inner):
    assert last_boxed(text) == inner


@given(
    st.recursive(
        st.text("ab ", max_size=3), lambda inner: st.lists(inner, max_size=3).map(lambda p: "{" + "".join(p) + "}")
    )
)
def test_any_balanced_content_comes_back(content):
    assert last_boxed(r"x \boxed{0} \boxed{" + content + "} y") == content


def test_a_long_response_of_unclosed_boxes_is_fast():
    assert last_boxed(r"\boxed{1}" + r"\boxed{" * 200_000) == "1"


def test_boxed_compares_contents():
    assert boxed(r"the answer is \boxed{ 12 }", "12") == 1.0
    assert boxed(r"\boxed{12}", r"\boxed{12}") == 1.0
    assert boxed("12", "12") == 0.0


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat", "cat dog", 2 / 3),
        ("cat cat", "cat dog", 0.5),
        ("bird", "cat", 0.0),
        ("the", "a", 1.0),
        ("", "cat", 0.0),
        ("dog", ["cat", "dog"], 1.0),
    ],
)
def test_f1_as_in_squad(response, label, value):
    assert f1(response, label) == pytest.approx(value)


@pytest.mark.parametrize("rule", [exact, boxed, f1])
def test_no_response_scores_zero_and_no_label_is_an_error(rule):
    assert rule(None, "x") == 0.0
    for label in (None, "", "  ", [], [None]):
        with pytest.raises(DataError, match="--label-key"):
            rule("x", label)


@pytest.mark.parametrize(("make", "scores"), [(make_exact, [1, 0, 0]), (make_boxed, [0, 1, 0]), (make_f1, [1, 0, 0])])
def test_rewards_score_samples_and_need_labels(make, scores):
    assert make.check_label
    reward = RewardFunction(make(), "rule", "--rm-type rule", "async")
    batch = [Sample(response=text, label="yes", index=10 + i) for i, text in enumerate(["yes", r"\boxed{yes}", ""])]
    asyncio.run(score(batch, reward, SimpleNamespace(reward_key=None)))
    assert [sample.reward for sample in batch] == scores
    with pytest.raises(DataError, match=r"sample 5, .* rule \(--rm-type rule\): the label is None.*--label-key"):
        asyncio.run(score([Sample(response="a", label=None, index=5)], reward, SimpleNamespace(reward_key=None)))
