import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.plugin.facts import Fact, State
from miles_core.plugin.rule import Compare, Join, Not, RuleError, Truth, UnknownFact, conjuncts, evaluate, names, parse

WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,6}(\.[a-z][a-z0-9_]{0,4})?", fullmatch=True).filter(
    lambda w: w not in {"and", "or", "not", "in", "true", "false", "none"}
)
VALUES = st.one_of(
    WORDS,
    st.integers(-1000, 1000),
    st.booleans(),
    st.none(),
    st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3)),
)
TESTS = st.one_of(
    st.builds(Compare, WORDS),
    st.builds(lambda n, o, v: Compare(n, o, (v,)), WORDS, st.sampled_from(("==", "!=", ">=", "<=", ">", "<")), VALUES),
    st.builds(Compare, WORDS, st.sampled_from(("in", "not in")), st.lists(VALUES, min_size=1, max_size=3).map(tuple)),
)
CONDITIONS = st.recursive(
    TESTS,
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.builds(Join, st.sampled_from(("and", "or")), st.lists(inner, min_size=2, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)


def lookup(**values):
    """Facts by name with ``__`` for the dot; a State instead of a value is that state."""

    def find(name):
        value = values.get(name.replace(".", "__"), State.NO_SUCH_NAME)
        return Fact(name, None, "", value) if isinstance(value, State) else Fact(name, value, "test")

    return find


@given(CONDITIONS)
def test_what_is_printed_reads_back_as_the_same(condition):
    assert parse(str(condition)) == condition


@given(CONDITIONS, st.data())
def test_evaluation_agrees_with_python_where_everything_is_known(condition, data):
    known = {name: data.draw(st.booleans(), label=name) for name in dict.fromkeys(names(condition))}

    def expected(part):
        if isinstance(part, Not):
            return not expected(part.part)
        if isinstance(part, Join):
            return (all if part.op == "and" else any)([expected(p) for p in part.parts])
        value = known[part.name]
        if not part.op:
            return value
        return any(value is v for v in part.values) is (part.op in ("==", "in"))

    if any(op in str(condition) for op in (">", "<")):
        return  # truths have no order; see test_order_of_words_is_refused
    truth = evaluate(condition, lambda n: Fact(n, known[n], "test"))
    assert truth is (Truth.TRUE if expected(condition) else Truth.FALSE)


@given(CONDITIONS, st.lists(st.sampled_from((State.UNKNOWN, State.NOT_APPLICABLE)), min_size=1))
def test_a_decided_outcome_does_not_depend_on_what_is_unknown(condition, states):
    """De Morgan's law holds in all four outcomes: ``not (a and b)`` is ``(not a) or (not b)``."""
    ordered = list(dict.fromkeys(names(condition)))
    facts = {name: Fact(name, None, "", states[i % len(states)]) for i, name in enumerate(ordered)}
    both = Join("and", (condition, Not(condition)))
    either = Join("or", (Not(condition), Not(Not(condition))))
    assert evaluate(Not(both), facts.__getitem__) is evaluate(either, facts.__getitem__)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("gpu.sm >= 100", Truth.FALSE),
        ("gpu.sm >= 90 and model.moe", Truth.TRUE),
        ("train.precision in {bf16, fp8}", Truth.TRUE),
        ("train.precision not in {bf16, fp8}", Truth.FALSE),
        ("not (model.moe and gpu.sm > 90)", Truth.TRUE),
        ("model.quantized", Truth.FALSE),
        ("train.precision", Truth.TRUE),
        ("unset == none", Truth.TRUE),
        ("unset >= 3", Truth.FALSE),
        ("engine.version >= 0.5.9", Truth.TRUE),
        ("engine.version >= 0.6", Truth.FALSE),
        ("model.moe == 1", Truth.FALSE),
        ("elsewhere >= 5", Truth.UNKNOWN),
        ("elsewhere >= 5 or model.moe", Truth.TRUE),
        ("inactive == 5", Truth.VACUOUS),
        ("inactive == 5 and model.moe", Truth.VACUOUS),
        ("inactive == 5 and not model.moe", Truth.FALSE),
        ("inactive and elsewhere", Truth.UNKNOWN),
        ("", Truth.TRUE),
    ],
)
def test_outcomes(text, truth):
    facts = lookup(
        gpu__sm=90,
        model__moe=True,
        train__precision="bf16",
        model__quantized="none",
        unset=None,
        engine__version="0.5.10.post1",
        elsewhere=State.UNKNOWN,
        inactive=State.NOT_APPLICABLE,
    )
    assert evaluate(text, facts) is truth


def test_and_binds_tighter_than_or():
    assert parse("a or b and not c") == parse("a or (b and (not c))")


def test_reading_stops_where_the_condition_is_wrong():
    for text, expected in {
        "gpu.sm >=": "expected a value, found the end",
        "gpu.sm 90": "expected 'and', 'or' or the end, found '90'",
        "(a or b": "expected ')', found the end",
        "a in b": "expected '{', found 'b'",
        "a not b": "expected 'in', found 'b'",
        "and a": "expected the name of a fact, found 'and'",
        "a == and": "expected a value, found 'and'",
        "a == 'x'": "cannot read \"'x'\"",
        "__import__('os')": "cannot read",
    }.items():
        with pytest.raises(RuleError) as refused:
            parse(text)
        assert expected in str(refused.value), text


def test_order_of_words_is_refused():
    with pytest.raises(RuleError, match="gpu = H200 has no order against 90"):
        evaluate("gpu >= 90", lookup(gpu="H200"))


def test_a_name_nobody_defines_is_an_error_only_where_evaluation_reaches_it():
    with pytest.raises(UnknownFact, match=r"there is no fact 'gpu\.smm'"):
        evaluate("gpu.smm >= 90", lookup())
    assert evaluate("model.moe or gpu.smm >= 90", lookup(model__moe=True)) is Truth.TRUE


def test_conjuncts_are_the_parts_of_a_top_level_and():
    assert [str(c) for c in conjuncts(parse("plugin.a and (b or c) and d == 1"))] == ["plugin.a", "b or c", "d == 1"]
    assert [str(c) for c in conjuncts(parse("a or b"))] == ["a or b"]
