"""The prompt source: weights, endless and finite sets, curricula, resume, and tasks that cannot be made."""

import pytest

from miles_core.plugin import ConfigError, DataError
from miles_environments.config import EnvironmentsConfig
from miles_environments.curriculum import Curriculum
from miles_environments.entry import read_entry
from miles_environments.mixture import Mixture
from miles_environments.registry import KEY, Registry
from miles_testing import PromptSourceContract


def make(mix, seed=1, chat=False, length=None, held_out=False):
    registry = Registry(EnvironmentsConfig(mix=mix), seed)
    return Mixture(registry, registry.held_out if held_out else registry.train, seed, chat, length, held_out)


class TestMixture(PromptSourceContract):
    @pytest.fixture(autouse=True)
    def _own(self, own):
        self.mix = (f"file:{own}:Sums?weight=3", f"file:{own}:Novel")

    def make(self):
        return make(self.mix)


class TestHeldOut(PromptSourceContract):
    @pytest.fixture(autouse=True)
    def _own(self, own):
        self.mix = (f"file:{own}:Sums?length=5",)

    def make(self):
        return make(self.mix, length=8, held_out=True)


def test_weights_and_seeds(own):
    mix = (f"file:{own}:Sums?weight=3", f"file:{own}:Novel")
    rows = make(mix).next(400)
    labels = [row.metadata[KEY]["label"] for row in rows]
    assert 270 < labels.count("Sums") < 330
    assert [row.prompt for row in make(mix).next(50)] == [row.prompt for row in rows[:50]]
    assert [row.prompt for row in make(mix, seed=2).next(50)] != [row.prompt for row in rows[:50]]
    numbers = [row.metadata[KEY]["number"] for row in rows if row.metadata[KEY]["label"] == "Sums"]
    assert numbers == [n for n in range(numbers[-1] + 1) if n % 7 != 3]  # the environment cannot make those


def test_parts_of_task_sets(own):
    rows = make((f"file:{own}:Novel?first=4&count=3",)).next(7)
    assert [row.prompt for row in rows] == [f"say {n}" for n in (4, 5, 6, 4, 5, 6, 4)]
    rows = make((f"file:{own}:Sums?length=3",)).next(4)
    assert [row.metadata[KEY]["number"] for row in rows] == [0, 1, 2, 0]


def test_chat_messages_and_instructions(own):
    row = make((f"file:{own}:Sums?answer=tag",), chat=True).next(1)[0]
    assert row.prompt[0] == {"role": "system", "content": "Give the final answer between <answer> and </answer>."}
    assert row.prompt[1] == {"role": "user", "content": "1 + 0"} and row.label == 1
    row = make((f"file:{own}:Sums?instructions=Be%20short.",)).next(1)[0]
    assert row.prompt == "Be short.\n1 + 0"


def test_an_environment_that_makes_no_task_stops_the_run(own):
    with pytest.raises(
        DataError,
        match=r"the environment Sums cannot make its task 3: OSError: no such task; the last 100 tasks failed",
    ):
        make((f"file:{own}:Sums?first=3&count=1",)).next(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file:OWN:Missing", "Missing is not a subclass of miles_environments.Environment"),
        ("file:OWN", "it names no class"),
        ("file:nowhere.py:A", "there is no file nowhere.py"),
        ("file:OWN:Sums?level=3", "level is 3, and it has 3"),
        ("file:OWN:Novel?curriculum=1", "it has no difficulty levels"),
        ("file:OWN:Novel?speed=3", r"the library refuses it \(TypeError: .*speed"),
    ],
)
def test_environments_that_cannot_be_made(own, text, message):
    with pytest.raises(ConfigError, match=message):
        make((text.replace("OWN:", f"{own}:").replace("file:OWN", f"file:{own}"),))


@pytest.mark.parametrize("library", ["reasoning_gym:a", "verifiers:a:B", "textarena:a", "openenv:http://a"])
def test_libraries_that_are_not_installed(library, monkeypatch):
    import sys

    for name in ("reasoning_gym", "verifiers", "verifiers.v1", "textarena", "openenv"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=r"the library is not installed; pip install (reasoning-gym|verifiers|textarena|openenv)"
    ):
        make((library,))


def test_difficulty_follows_success():
    entry = read_entry("file:a:B?curriculum=1&window=4&up=0.75&down=0.25", "x")
    curriculum = Curriculum(entry, 3)
    curriculum.update([(0, 1.0)] * 3)
    assert curriculum.level == 0  # too few
    curriculum.update([(0, 1.0), (2, 0.0)])  # those of another level do not count
    assert curriculum.level == 1
    saved = curriculum.state()
    for rewards, level in (
        ([0, 1, 0, 1], 1),
        ([1, 0, 0, 0], 0),
        ([0, 0, 0, 0], 0),
        ([1, 1, 1, 0], 1),
        ([1] * 4, 2),
        ([1] * 4, 2),
    ):
        curriculum.update([(curriculum.level, float(reward)) for reward in rewards])
        assert curriculum.level == level
    again = Curriculum(entry, 3)
    again.load_state(saved)
    assert again.level == 1 and again.state() == saved
    with pytest.raises(DataError, match="was at level 1, and has 1 levels now"):
        Curriculum(entry, 1).load_state(saved)
