"""Two policies in one transcript: own engines, own tokens, opposite rewards."""

import pytest

from miles_testing import toy_run

WATCH = """
from miles_core.plugin import hookimpl

@hookimpl
def on_start(run):
    run.stash["requests"], run.stash["samples"] = [], []

@hookimpl
def on_request(run, request):
    run.stash["requests"].append(request.policy)

@hookimpl
def on_sample(run, sample):
    run.stash["samples"].append(sample)
"""

OPTIONS = {"generate": "game", "rm_type": "game", "custom_rm_path": None}


def test_each_player_is_asked_and_trained_on_its_own_tokens(tmp_path):
    (tmp_path / "watch.py").write_text(WATCH)
    done = toy_run(["self_play", str(tmp_path / "watch.py")], steps=3, **OPTIONS)
    requests, samples = done.run.stash["requests"], done.run.stash["samples"]
    assert requests.count("policy") == requests.count("guesser") == 24
    games = {}
    for sample in samples:
        games.setdefault(sample.index, {})[sample.policy] = sample
    for game in games.values():
        one, two = game["policy"], game["guesser"]
        assert one.tokens == two.tokens and one.reward + two.reward == 1.0
        assert not any(a and b for a, b in zip(one.mask, two.mask, strict=True))
        assert {version for _, version in two.weight_versions} == {version for _, version in one.weight_versions}
    for record in done.metrics:
        assert record["policy/reward/mean"] + record["guesser/reward/mean"] == pytest.approx(1.0)
        for name in ("policy", "guesser"):  # on-policy: the engine that answered has the weights that are trained
            assert record[f"{name}/mismatch/abs_log_prob"] < 1e-4
    assert any(record["guesser/train/grad_norm"] > 0 for record in done.metrics)
