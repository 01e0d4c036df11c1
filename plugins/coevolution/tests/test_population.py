"""Selection, mutation and phases as pure functions."""

import random

import pytest

from miles_coevolution.matches import Matchmaker
from miles_coevolution.population import Side, active_sides, mutate, perturb, select
from miles_coevolution.rounds import Tally, swing

OPTIONS = {name: {"train.lr": value} for name, value in zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True)}


def choose(fitness, fraction=0.25, seed=0):
    return select(fitness, OPTIONS, fraction, 1.2, random.Random(seed))


def test_the_worst_become_mutated_copies_of_the_best():
    (one,) = choose({"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.4})
    assert (one.loser, one.winner) == ("a", "b")
    assert one.options["train.lr"] in (pytest.approx(2.0 * 1.2), pytest.approx(2.0 / 1.2))
    assert {(r.loser, r.winner) for r in choose({"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.4}, 0.5)} <= {
        (loser, winner) for loser in "ad" for winner in "bc"
    }
    assert {r.loser for r in choose({"a": 0.1, "b": 0.9, "c": 0.5, "d": 0.4}, 0.5)} == {"a", "d"}


def test_equal_scores_and_members_without_games_stay():
    assert choose(dict.fromkeys("abcd", 0.5), 0.5) == []
    assert [r.loser for r in choose({"a": 0.1, "b": 0.9})] == ["a"]
    assert choose({"a": 0.1}) == []


def test_mutations_are_one_factor_up_or_down_and_spreads_stay_within_it():
    draw = random.Random(1)
    found = [mutate({"x": 1.0}, 2.0, draw)["x"] for _ in range(200)]
    assert set(found) == {0.5, 2.0} and 60 < found.count(2.0) < 140
    spreads = [perturb({"x": 1.0}, 2.0, draw)["x"] for _ in range(200)]
    assert 0.5 <= min(spreads) < 0.6 and 1.8 < max(spreads) <= 2.0


def test_phases():
    sides = [Side("one", ("one",)), Side("two", ("two",))]
    alternating = [active_sides(sides, step, 2, True)[0].name for step in range(6)]
    assert alternating == ["one", "one", "two", "two", "one", "one"]
    assert active_sides(sides, 3, 2, False) == tuple(sides)


def draws(sides, roles=("first", "second"), fixed=False, active=None, past=0.5, count=400):
    maker = Matchmaker(sides, 7, lambda step: sides if active is None else active, past)
    return [maker.draw(roles, fixed, group, 3) for group in range(count)]


def test_matches_are_repeatable_and_mix_roles_and_members():
    sides = [Side("one", ("one", "one-1")), Side("two", ("two",))]
    found = draws(sides)
    assert found == draws(sides)
    assert {frozenset(m.players.values()) for m in found} == {frozenset({"one", "two"}), frozenset({"one-1", "two"})}
    firsts = [m.players["first"] for m in found]
    assert 150 < firsts.count("two") < 250 and all(len(m.learners) == 2 for m in found)
    population = draws([Side("p", ("p", "p-1", "p-2"))])
    assert (
        all(len({*m.players.values()}) == 2 for m in population)
        and len({frozenset(m.players.values()) for m in population}) == 3
    )


def test_a_policy_against_itself_learns_from_one_role():
    found = draws([Side("p", ("p",))])
    assert all(len(m.learners) == 1 and not m.against_past for m in found)
    assert {next(iter(m.learners)) for m in found} == {"first", "second"}


def test_past_versions_play_for_the_waiting_side():
    sides = [Side("proposer", ("proposer",), "proposer-past"), Side("solver", ("solver",), "solver-past")]
    found = draws(sides, ("proposer", "solver"), True, active=[sides[1]])
    past = [m for m in found if m.against_past]
    assert 150 < len(past) < 250
    assert all(m.players == {"proposer": "proposer-past", "solver": "solver"} for m in past)
    assert all(m.learners == {"solver"} for m in past)
    alone = draws([Side("p", ("p",), "p-past")], past=0.1)
    assert all(m.against_past and set(m.players.values()) == {"p", "p-past"} for m in alone)


def test_a_cycle_is_a_change_of_direction_in_most_phases():
    assert swing([0.2, 0.8] * 4) == pytest.approx(0.6)
    assert swing([0.1 * n for n in range(8)]) == 0.0 and swing([0.2, 0.8]) == 0.0


def test_a_tally_is_json():
    tally = Tally()
    tally.add("x", [1.0, 0.0])
    again = Tally(dict(tally.data))
    again.add("x", [1.0])
    assert again.means() == {"x": pytest.approx(2 / 3)} and tally.means() == {"x": 0.5}
