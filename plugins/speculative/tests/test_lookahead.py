"""``auto`` against simulated costs and acceptances: what it chooses, and what it costs to find out."""

import random

import pytest

from miles_core.observe.hints import review
from miles_speculative import plugin
from miles_speculative.acceptance import Acceptance
from miles_speculative.ledger import Ledger
from miles_speculative.lookahead import Auto
from miles_speculative.report import summarise


def simulate(auto, steps, rows, accept, draft, busy=False):
    """(tokens a second, those without drafts, the numbers of drafts chosen): a plain step takes 1, a draft ``draft``, and to verify it 0.02.
    ``busy``: for about 60 steps at a time all take 1.8 times as long, and a third is lengthened further, which is not this run's fault."""
    rng, others = random.Random(0), random.Random(1)
    tokens, seconds, chosen, slow = 0, 0.0, [], False
    for _ in range(steps):
        k = auto.choose(rows)
        tried, kept = [rows] * k, [0] * k
        for _ in range(rows):
            depth = 0
            while depth < k and rng.random() < accept:
                kept[depth] += 1
                depth += 1
        took = (1 + k * (draft + 0.02)) * (1 + rng.uniform(-0.02, 0.02))
        slow ^= busy and others.random() < 1 / 60
        more = (1.8 if slow else 1) * (1 + (others.random() < 0.3) * others.expovariate(1)) if busy else 1
        auto.record(rows, k, took * more, True, tried, kept)
        tokens += rows + sum(kept)
        seconds += took
        chosen.append(k)
    return tokens / seconds, rows, chosen


@pytest.mark.parametrize("rows", [1, 16, 200])
@pytest.mark.parametrize(("accept", "draft"), [(0.05, 0.2), (0.3, 0.5), (0.5, 0.1), (0.8, 0.1), (0.95, 0.05)])
def test_it_pays_or_it_is_off(rows, accept, draft):
    fast, plain, chosen = simulate(Auto(), 600, rows, accept, draft)
    best = max(sum(accept**d for d in range(k + 1)) / (1 + k * (draft + 0.02)) for k in range(9))
    assert fast / plain > (0.94 if rows > 1 else 0.9) * max(best, 1.0), (
        fast / plain,
        best,
        chosen[-20:],
    )  # chance, and the price of finding out
    if best == 1.0:
        assert chosen[100:].count(0) > 0.9 * 500


@pytest.mark.parametrize(("accept", "draft"), [(0.05, 0.2), (0.3, 0.5), (0.8, 0.1)])
def test_a_busy_machine_costs_little_of_it(accept, draft):
    fast, plain, _ = simulate(Auto(), 600, 4, accept, draft, busy=True)
    best = max(sum(accept**d for d in range(k + 1)) / (1 + k * (draft + 0.02)) for k in range(9))
    assert fast / plain > (0.96 if best == 1.0 else 0.85) * best


def test_it_follows_what_changes():
    auto = Auto()
    assert simulate(auto, 300, 8, 0.1, 0.3)[2][-1] == 0
    assert simulate(auto, 900, 8, 0.9, 0.1)[2][-1] >= 3  # the draft learned
    assert simulate(auto, 900, 8, 0.05, 0.3)[2][-1] == 0  # the policy left it behind


def test_steps_that_are_never_timed_leave_it_with_few_drafts():
    auto = Auto()
    chosen = []
    for _ in range(200):
        chosen.append(auto.choose(4))
        auto.record(4, chosen[-1], 1.0, False, [4] * chosen[-1], [4] * chosen[-1])
    assert set(chosen) == {0, 1}


def test_depths_that_were_never_tried_continue_the_last_ratio():
    acceptance = Acceptance(8)
    acceptance.add([1000, 1000], [800, 400])
    assert acceptance.length(2) == pytest.approx(1 + 0.8 + 0.4, abs=0.01)
    assert acceptance.length(4) == pytest.approx(1 + 0.8 + 0.4 + 0.2 + 0.1, abs=0.01)


def test_what_an_engine_says_of_drafts_of_its_own_is_in_the_report():
    metrics = {"engine/accept_rate": 0.5, "engine/accepted_to_1": 0.7, "engine/other": 1.0}
    summarise(metrics)
    assert metrics.pop("speculative/accept_rate") == 0.5 and metrics.pop("speculative/accepted_to_1") == 0.7
    assert not [name for name in metrics if name.startswith("speculative")]


class Row:
    def __init__(self):
        self.metrics = {}


@pytest.mark.parametrize(
    ("cost", "hints"),
    [(5.0, {"drafts-cannot-pay"}), (2.0, {"slow-speculation"}), (1.1, set())],
    ids=["too dear", "too seldom kept", "sound"],
)
def test_a_hint_says_when_drafts_cannot_pay(cost, hints):
    """Steps with two drafts of which a quarter are kept, for ``cost`` plain steps each, next to plain steps."""
    ledger, row = Ledger(2), Row()
    ledger.begin(row)
    for i in range(40):
        kept = [2] if i % 4 == 0 else [0]
        ledger.count([row], 2, [2], kept)
        ledger.spend([row], cost, 1.0, kept)
    ledger.end(row)
    metrics = {f"engine/{name}": value for name, value in row.metrics.items()}
    summarise(metrics)
    assert metrics["speculative/best_speedup"] == pytest.approx(3 / cost)
    assert metrics["speculative/speedup"] == pytest.approx(1.5 / cost)
    found = review([{"step": i, **metrics} for i in range(5)], plugin.hints)
    assert {advice.hint.name for advice in found} - {"low-acceptance"} == hints
