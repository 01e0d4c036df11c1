"""Who shares a GPU, what is refused, and that what is offered instead fits."""

import pytest

from miles_core.plugin import Facts
from miles_core.plugin.facts import Fact
from miles_core.plugin.memory import GB, Parts, Usage, review_memory

TRAINER = Usage("trainer", "rank", Parts(weights=10 * GB, optimizer=60 * GB), asleep=1 * GB)
ENGINE = Usage("engine", "GPU", Parts(weights=10 * GB, cache=50 * GB), asleep=2 * GB)


def facts(memory=80, **values):
    given = {"gpu.memory_gb": memory, "engine": "e", "trainer": "t", "runtime": "other", "colocate": False, **values}
    return Facts(Fact(name, value, "--given") for name, value in given.items())


def refused(*usages, **values):
    return [problem.headline for problem in review_memory(usages, facts(**values))[1]]


def test_processes_on_gpus_of_their_own_are_compared_alone():
    assert refused(TRAINER, ENGINE) == []
    assert refused(TRAINER, ENGINE, memory=70) == ["the trainer t needs 74 GB on each GPU"]
    assert refused(TRAINER, ENGINE, memory=60) == [
        "the trainer t needs 74 GB on each GPU",
        "the engine e needs 63 GB on each GPU",
    ]


def test_one_process_holds_both():
    assert refused(TRAINER, ENGINE, runtime="inline") == ["the trainer t and the engine e need 137 GB on each GPU"]
    assert refused(TRAINER, ENGINE, runtime="inline", memory=137) == []


def test_several_ranks_are_never_in_one_process():
    ranks = Usage("trainer", "rank", TRAINER.parts, processes=8)
    assert refused(ranks, ENGINE, runtime="inline") == []


@pytest.mark.parametrize(("memory", "good"), [(77, True), (75, False)])
def test_who_takes_turns_has_the_other_asleep_beside_it(memory, good):
    assert (refused(TRAINER, ENGINE, colocate=True, memory=memory) == []) is good  # 70 + 2 of 95 %


def test_a_weight_sync_needs_both_sides_weights():
    trainer = Usage("trainer", "rank", Parts(weights=40 * GB))
    engine = Usage("engine", "GPU", Parts(weights=45 * GB))
    (problem,) = {p.headline: p for p in review_memory([trainer, engine], facts(colocate=True))[1]}.values()
    assert "weight sync" in str(problem.values) and problem.headline.endswith("need 89 GB on each GPU")


def test_a_plugin_replaces_the_usage_of_a_backend():
    smaller = Usage("trainer", "rank", Parts(weights=10 * GB, optimizer=1 * GB), replaces=True)
    assert refused(TRAINER, smaller, ENGINE, memory=66) == []
    assert refused(smaller, TRAINER, memory=66) == [] != refused(TRAINER, memory=66)
    (note,), _ = review_memory([TRAINER, smaller, ENGINE], facts())
    assert "70.0" not in note and note.count("trainer, rank") == 1 and "engine, GPU" in note


def test_nothing_is_compared_without_a_gpu():
    notes, problems = review_memory([TRAINER, ENGINE], facts(memory=0))
    assert not problems and "--hardware 8xH200" in notes[0]


def test_the_table_has_a_row_for_each_process_and_no_empty_column():
    (note,), _ = review_memory([TRAINER, ENGINE], facts())
    assert "trainer, rank" in note and "engine, GPU" in note and "70.0" in note and "draft" not in note


def test_changes_are_asked_for_with_the_room_that_is_left():
    asked = []

    def fitting(budget, alone):
        asked.append((budget / GB, alone / GB))
        return [{"a": 1}]

    trainer = Usage("trainer", "rank", TRAINER.parts, fitting=fitting)
    (problem,) = review_memory([trainer, ENGINE], facts(runtime="inline"))[1]
    assert asked == []  # only for a run that is refused for good
    assert list(problem.tries()) == [{"a": 1}]
    assert asked == [(pytest.approx(16), pytest.approx(76))]


def test_a_critic_in_the_same_process_adds_up():
    critic = Usage("trainer", "critic", Parts(weights=5 * GB, optimizer=30 * GB))
    assert refused(TRAINER, critic, ENGINE, runtime="inline", memory=174) == []  # 70 + 35 + 60 of 95 %
    (first, *_) = refused(TRAINER, critic, ENGINE, runtime="inline", memory=170)
    assert first.endswith("need 174 GB on each GPU")
    assert refused(TRAINER, critic, ENGINE, memory=75) == []  # GPUs of their own
