"""Whole runs: who learns when, past versions, selection, and resuming bit for bit."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from miles_coevolution import plugin
from miles_coevolution.hooks import LEAGUE
from miles_core.observe.hints import Hints
from miles_core.plugin import DataError, MilesError, PlanError
from miles_testing import RolloutFunctionContract
from miles_testing import toy_run as make_run
from miles_testing.doubles import remote

NIM = {"generate": "nim", "prompts": "nim", "rm_type": "game", "custom_rm_path": None, "prompt_data": "1-6"}
WATCH = """
from miles_core.plugin import hookimpl

@hookimpl
def on_start(run):
    run.state["samples"] = []

@hookimpl
def on_sample(run, sample):
    run.state["samples"].append((run.step, sample))
"""


class TestNim(RolloutFunctionContract):
    plugins = ("coevolution",)
    options = NIM | {"co_evolution_past_versions": 2}


@pytest.fixture(scope="module")
def legal(tmp_path_factory):
    """The toy model after a few supervised steps on random legal moves."""
    directory, draw = tmp_path_factory.mktemp("nim"), random.Random(0)
    rows = []
    for _ in range(300):
        pile, text = draw.randint(1, 6), ""
        while pile:
            text, move = f"{text}{pile}:", draw.randint(1, min(3, pile))
            rows.append({"input": text, "response": str(move)})
            text, pile = f"{text}{move} ", pile - move
    file = directory / "moves.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    options = {"sft_data": file, "sft_steps": 60, "sft_batch_size": 64, "sft_lr": 1e-2, "export_hf": directory / "hf"}
    make_run(steps=0, **options)
    return directory / "hf"


@pytest.fixture
def run(toy_run, legal, tmp_path):
    def run(configuration="", watch=False, plugins=(), **options):
        file = tmp_path / "run.yaml"
        file.write_text(configuration)
        (tmp_path / "watch.py").write_text(WATCH)
        plugins = ["coevolution", *plugins, *([str(tmp_path / "watch.py")] if watch else [])]
        return toy_run(
            plugins, config=file, hf_checkpoint=legal, **{**NIM, "lr": 1e-2, "rollout_batch_size": 6, **options}
        )

    return run


TWO = "policies: {one: {}, two: {}}\n"


def trained(metrics, name):
    return [f"{name}/train/grad_norm" in record for record in metrics]


def test_phases_alternate_and_everyone_plays(run):
    done = run(f"{TWO}co_evolution: {{strategy: alternating, interval: 2}}", watch=True, steps=5)
    assert trained(done.metrics, "one") == [True, True, False, False, True]
    assert trained(done.metrics, "two") == [False, False, True, True, False]
    assert [record["coevolution/phase"] for record in done.metrics] == [0.0, 0.0, 1.0, 1.0, 0.0]
    for record in done.metrics:
        assert record["coevolution/one/win"] + record["coevolution/two/win"] == pytest.approx(1.0)
        assert record["coevolution/dominance"] == max(record["coevolution/one/win"], record["coevolution/two/win"])
    games = {}
    for step, sample in done.run.state["samples"]:
        games.setdefault((step, sample.rollout_id), []).append(sample)
    for one, two in games.values():
        assert {one.policy, two.policy} == {"one", "two"} and one.reward + two.reward == 1.0
        shared = min(one.response_length, two.response_length)
        assert one.tokens[:shared] == two.tokens[:shared] and one.status == two.status == "completed"
        assert not any(a and b for a, b in zip(one.mask, two.mask, strict=False))


def test_simultaneous_phases_train_everyone(run):
    done = run(f"{TWO}co_evolution: {{strategy: simultaneous}}", steps=2)
    assert trained(done.metrics, "one") == trained(done.metrics, "two") == [True, True]
    assert "coevolution/phase" not in done.metrics[0]
    for record in done.metrics:  # on-policy: each engine has the weights that are trained
        assert max(record[f"{name}/mismatch/abs_log_prob"] for name in ("one", "two")) < 1e-4


def test_a_policy_plays_its_past(run):
    done = run(
        "co_evolution: {past_versions: 2, interval: 1}",
        watch=True,
        steps=4,
        eval_prompts="nim",
        eval_prompt_data="1-6",
        eval_interval=2,
    )
    past = done.run.policies[1]
    assert (past.name, past.role, past.trained) == ("policy-past", "frozen", 0)
    kept = sorted(path.name for path in (done.directory / "coevolution").iterdir())
    assert kept == ["policy-00000003", "policy-00000004"]
    steps = [record for record in done.metrics if "train/loss" in record]
    assert len(steps) == 4 and all(0 <= record["coevolution/policy/past_age"] <= 2 for record in steps)
    assert all(0 <= record["coevolution/policy/win_against_past"] <= 1 for record in steps)
    assert all(sample.policy == "policy" for _, sample in done.run.state["samples"])
    assert [record["step"] for record in done.metrics if "eval/reward" in record] == [0, 2, 4]


def test_the_first_past_version_is_that_after_a_warm_start(run, legal):
    rows = legal.parent / "moves.jsonl"
    options = {"sft_data": rows, "sft_steps": 2, "sft_batch_size": 8, "sft_lr": 1e-2}
    done = run("co_evolution: {past_versions: 2, interval: 2}", steps=1, **options)
    kept = load_file(done.directory / "coevolution" / "policy-00000000" / "trainer" / "model.safetensors")
    past = dict(done.parts[1].learner.rank.trainer.model.named_parameters())
    assert all(torch.equal(past[name], value) for name, value in kept.items())


POPULATION = "co_evolution: {strategy: simultaneous, population_size: 3, interval: 2, mutate: [lr, clip_grad]}"


def test_workers_in_other_processes_evolve_the_same(run, toy_run):
    configuration = f"{TWO}co_evolution: {{population_size: 2, past_versions: 1, strategy: simultaneous}}"
    here, there = (
        run(configuration, plugins=plugins, steps=2, **options).metrics
        for plugins, options in (((), {}), ((remote.__file__,), {"runtime": "remote"}))
    )
    for one, two in zip(here, there, strict=True):
        names = [name for name in one if name.startswith("coevolution/") or name.endswith("train/loss")]
        assert len(names) > 10 and [one[name] for name in names] == [two[name] for name in names]


def test_the_worst_of_a_population_becomes_a_mutated_copy_of_the_best(run):
    done = run(POPULATION, steps=4, rollout_batch_size=12)
    names = [policy.name for policy in done.run.policies]
    assert names == ["policy", "policy-1", "policy-2"]
    rates = {name: [record[f"coevolution/{name}/lr"] for record in done.metrics] for name in names}
    assert rates["policy"][0] == 1e-2 and all(1e-2 / 1.2 <= r[0] <= 1e-2 * 1.2 for r in rates.values())
    replaced = [record.get("coevolution/replaced") for record in done.metrics]
    assert replaced[1] == 1.0 and replaced[3] == 2.0
    before, after = ({name: r[at] for name, r in rates.items()} for at in (1, 2))
    (changed,) = [name for name in names if before[name] != after[name]]
    others = [before[name] for name in names if name != changed]
    assert any(after[changed] == pytest.approx(value * factor) for value in others for factor in (1.2, 1 / 1.2))
    assert done.metrics[2][f"{changed}/train/lr"] == after[changed]


@pytest.mark.parametrize(
    "configuration",
    [POPULATION, f"{TWO}co_evolution: {{past_versions: 2, interval: 1}}"],
    ids=["population", "past versions"],
)
def test_a_resumed_run_goes_on_bit_for_bit(run, tmp_path, configuration):
    options = {"rollout_batch_size": 8}
    whole = run(configuration, steps=5, directory=tmp_path / "whole", **options).metrics
    run(configuration, steps=3, directory=tmp_path / "parts", **options)
    for path in (tmp_path / "parts" / "coevolution").glob("*"):  # the checkpoint has a copy
        path.rename(tmp_path / path.name)
    resumed = run(configuration, steps=5, directory=tmp_path / "parts", load=tmp_path / "parts", **options).metrics
    for one, two in zip(whole, resumed, strict=True):
        names = [n for n in one if n.startswith("coevolution/") or n.endswith(("train/loss", "grad_norm", "train/lr"))]
        assert len(names) > 4 and {n: one[n] for n in names} == {n: two.get(n) for n in names}


def test_a_resumed_run_keeps_the_versions_of_past_opponents(run, tmp_path):
    """An opponent whose weights no step changed since the checkpoint has the version that it had before."""
    options = {"rollout_batch_size": 8, "watch": True}
    configuration = f"{TWO}co_evolution: {{past_versions: 2, past_probability: 1.0, interval: 2}}"
    whole = run(configuration, steps=4, directory=tmp_path / "whole", **options)
    run(configuration, steps=3, directory=tmp_path / "parts", **options)
    resumed = run(configuration, steps=4, directory=tmp_path / "parts", load=tmp_path / "parts", **options)
    versions = [
        sorted(
            (sample.index, sample.policy, sample.weight_versions)
            for step, sample in done.run.state["samples"]
            if step == 3
        )
        for done in (whole, resumed)
    ]
    assert versions[0] and versions[0] == versions[1]


@pytest.mark.parametrize("size", [2, 4])
def test_a_population_of_another_size_is_not_resumed(run, tmp_path, caplog, size):
    small, parts = POPULATION.replace("population_size: 3", "population_size: 2"), tmp_path / "parts"
    sizes = {2: small, 4: POPULATION.replace("population_size: 3", "population_size: 4")}
    run(POPULATION, steps=1, directory=parts, rollout_batch_size=8)
    caplog.clear()
    with pytest.raises(MilesError, match=f"coevolution.population_size was 3, is now {size}") as refused:
        run(sizes[size], steps=2, directory=parts, load=parts, rollout_batch_size=8)
    assert "\n" not in str(refused.value).strip() and not caplog.records, "one sentence, and no warning before it"


@pytest.mark.parametrize(
    ("configuration", "options", "message"),
    [
        ("co_evolution: {population_size: 1}", {}, "a population of one has none to compare"),
        ("co_evolution: {past_versions: 0}", {}, "an opponent for its only policy"),
        (
            f"{TWO}co_evolution: {{strategy: parallel}}",
            {},
            "strategy cannot be 'parallel'; it is one of alternating or simultaneous",
        ),
        (f"{TWO}co_evolution: {{interval: 0}}", {}, "interval cannot be 0; it must be >= 1"),
        (TWO, {"generate": "proposer"}, "a policy proposer and a policy solver"),
        ("policies: {proposer: {}, solver: {role: frozen}}", {"generate": "proposer"}, "a policy solver that trains"),
        ("policies: {proposer: {}, solver: {}, judge: {}}", {"generate": "proposer"}, "no policy judge that trains"),
        ("policies: {one: {}, two: {generates: false}}", {}, "an engine for the policy two"),
        ("co_evolution: {population_size: 2, mutate: [entropy_coef]}", {}, "a mutation multiplies the value"),
        ("co_evolution: {population_size: 2, mutate: [temperature]}", {}, "cannot be .temperature."),
        (TWO, {"schedule": "async"}, "a step's games belong to the players of that step"),
    ],
)
def test_what_cannot_evolve_is_refused_in_the_plan(plan, tmp_path, configuration, options, message):
    (tmp_path / "run.yaml").write_text(configuration)
    with pytest.raises(MilesError, match=f"(?s){message}"):
        plan(["coevolution"], config=tmp_path / "run.yaml", **NIM | options)


@pytest.mark.parametrize("written", ["co_evolution: {strategy: alternating}", "co_evolution: {interval: 20}"])
def test_a_single_policy_plays_against_a_past_version_of_itself(plan, run, tmp_path, written):
    (tmp_path / "run.yaml").write_text(written)
    planned = "\n".join(plan([], config=tmp_path / "run.yaml", **NIM).reviews)
    assert "plays against 1 past version of itself" in planned
    assert "policy-past" in [policy.name for policy in run(written, steps=1).run.policies]


def test_a_plan_lists_the_policies_that_the_run_will_have(plan, tmp_path):
    (tmp_path / "run.yaml").write_text(f"{TWO}co_evolution: {{population_size: 4, past_versions: 2}}")
    text = "\n".join(plan(["coevolution"], config=tmp_path / "run.yaml", **NIM).reviews)
    assert "10 policies with an engine" in text and "one: 4 that learn, one for past versions" in text


def test_a_reward_of_a_game_needs_a_game(toy_run, tmp_path):
    (tmp_path / "run.yaml").write_text(TWO)
    with pytest.raises(DataError, match="was not made by a game"):
        toy_run(["coevolution"], config=tmp_path / "run.yaml", rm_type="game", custom_rm_path=None)


def test_a_key_into_the_reward_of_a_game_is_refused_in_the_plan(plan, tmp_path):
    (tmp_path / "run.yaml").write_text(TWO)
    with pytest.raises(PlanError, match="this reward is a number"):
        plan(["coevolution"], config=tmp_path / "run.yaml", reward_key="x", **NIM)


def test_a_run_that_starts_again_forgets_everything(run):
    """What happens when a worker is lost before the first checkpoint: the steps begin at 0 in the same process."""
    done = run(POPULATION.replace("interval: 2", "interval: 1, past_versions: 2"), steps=1, rollout_batch_size=12)
    league = done.run.state[LEAGUE]
    initial = {name: dict(own) for name, own in league._initial.items()}
    assert league.values != initial and league.pool.versions and league.replaced
    league.restart()
    assert league.values == initial and league.pool.versions == league.slots == {} and league.replaced == 0


def test_hints_name_dominance_and_oscillation():
    hints = Hints(plugin.hints)
    found = [str(h) for _ in range(5) for h in hints.of({"coevolution/dominance": 0.95, "coevolution/one/swing": 0.1})]
    assert len(found) == 1 and "one side wins 95%" in found[0]
    (swings,) = hints.of({"coevolution/one/swing": 0.4, "coevolution/dominance": 0.6})
    assert "goes up and down by 40%" in str(swings) and "--co-evolution-past-versions" in str(swings)
