"""Entries of ``--environments``, as text and as tables, and what is refused."""

import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_environments.entry import read_entries, read_entry
from miles_environments.environment import find_answer
from miles_environments.review import split_fact


def test_text_and_table_are_the_same():
    text = "reasoning_gym:chain_sum?weight=2&min_terms=3&curriculum=true&instructions=Be%20short&ratio=.5"
    table = {"name": "reasoning_gym", "task": "chain_sum", "weight": 2, "min_terms": 3, "curriculum": True}
    entry = read_entry(text, "--environments")
    assert entry == read_entry({**table, "instructions": "Be short", "ratio": ".5"}, "--environments")
    assert (entry.label, entry.weight, entry.curriculum, entry.options["min_terms"]) == ("chain_sum", 2, True, 3)
    assert read_entry("gymnasium:a.b:Class", "x").label == "Class"
    assert read_entry({"name": "file", "task": "f.py:A", "options": {"level": 3}}, "x").options == {"level": 3}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("gym:x", "there is no library 'gym'; the libraries are reasoning_gym, verifiers"),
        ("reasoning_gym", "it names no task; write reasoning_gym:TASK"),
        ("reasoning_gym:a?weight", "'weight' is not key=value"),
        ("reasoning_gym:a?first=1&first=2", "first is given twice"),
        ("reasoning_gym:a?weight=much", "weight is 'much'; it must be a number"),
        ("reasoning_gym:a?weight=0", "weight must be above 0"),
        ("reasoning_gym:a?up=0.1", "down must be below up"),
        ("reasoning_gym:a?answer=json", "answer must be one of tag, text, line, number"),
        ("reasoning_gym:a?count=0", "count must be at least 1"),
        ("reasoning_gym:a?turns=0", "turns must be at least 1"),
        (5, "an environment is LIBRARY:TASK, or a table with name and task"),
        ({"name": "file", "task": "a:B", "options": 1}, "options is 1; it is a table"),
    ],
)
def test_entries_that_are_refused(raw, message):
    with pytest.raises(ConfigError) as error:
        read_entry(raw, "--environments")
    assert message in str(error.value) and "--environments" in str(error.value)


def test_labels_are_unique():
    with pytest.raises(ConfigError, match="two entries have the label 'a'"):
        read_entries(("reasoning_gym:a", "textarena:a"), "--environments")
    assert len(read_entries(("reasoning_gym:a", "textarena:a?label=b"), "--environments")) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environments": "gym:x"}, "there is no library 'gym'"),
        ({"environments": "gymnasium:a:B"}, "an episode of B has several turns, and this rollout function plays them"),
        ({"environments": None, "rm_type": "environments", "custom_rm_path": None}, "no environment is chosen"),
        (
            {"environments": "reasoning_gym:a", "rm_type": "f1", "label_key": "label"},
            "--environments supplies prompts and rewards",
        ),
        ({"rm_type": "unit_tests", "prompt_data": "x.jsonl", "reward_key": "x"}, "this reward is a number"),
    ],
)
def test_runs_that_the_plan_refuses(plan, options, message):
    with pytest.raises(PlanError, match=message):
        plan(["environments"], **{"prompt_data": None, "custom_rm_path": None, **options})


def test_the_plan_sets_prompts_and_rewards(plan):
    facts = plan(environments="reasoning_gym:a?weight=3", prompt_data=None, custom_rm_path=None)
    assert (facts.fact("data.prompts"), facts.fact("reward.rm_type")) == ("environments", "environments")
    with pytest.raises(PlanError, match="--generate environments"):  # the suggested fix
        plan(environments="gymnasium:a:B", prompt_data=None, custom_rm_path=None)


def test_a_list_of_tables_in_a_configuration_file(tmp_path):
    from miles_core.config.load import load

    (tmp_path / "c.yaml").write_text(
        "environments:\n  - {name: file, task: 'f.py:A', weight: 2}\n  - 'reasoning_gym:b?count=3'\n"
    )
    config = load(["--config", str(tmp_path / "c.yaml")])
    mix = config.environments.mix
    assert [entry.weight for entry in read_entries(mix, "x")] == [2, 1.0]
    fact = next(fact for fact in config.facts() if fact.name == "environments.mix")
    assert split_fact(fact.value) == mix
    assert split_fact("a:b?c=1,{'n': {'t': 'x}, {'}},d") == ("a:b?c=1", {"n": {"t": "x}, {"}}, "d")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 17.", "17"),
        ("57 - 87 = -30", "-30"),
        ("12 and then (-4)", "-4"),
        ("20-30", "30"),
        ("x = 1,234.50 units", "1234.50"),
        ("1,2,3", "3"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number_is_the_answer(text, number):
    assert find_answer(text, "number") == number


def test_options_of_prompt_files_without_files_are_a_line_of_the_plan(plan):
    options = {"environments": "reasoning_gym:a", "prompt_data": None, "custom_rm_path": None}
    assert not any("no effect" in line for line in plan(**options).advice)
    for name, value in (("label_key", "x"), ("rollout_shuffle", True)):
        assert any("no effect: --input-key, --label-key" in line for line in plan(**options, **{name: value}).advice)
