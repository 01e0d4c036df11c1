"""Every installed plugin alone and every pair of them: refused with the reason expected, or a toy run passes.

Plugins are discovered, so a new one is covered when it is installed; a refusal of it that is not in ``REFUSED`` fails.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from miles_core.errors import PlanError
from miles_core.plugin.discovery import discover
from miles_testing.matrix import SIZES, toy_options

#: Without backends, which are in every run.
MANIFESTS = {name: found for name, found in discover().items() if not {"engine", "trainer"} & found.provides.keys()}
FORMATS = tuple(name for name, manifest in MANIFESTS.items() if "precision" in manifest.claims)

#: Who refuses whom: plugins (all of them in the run), model family, rollout precision or precisions of both sides ("" is any), words of
#: the reason.
REFUSED: tuple[tuple[frozenset[str], str, str, str], ...] = (
    (frozenset({"r3"}), "llama", "", "there is no router to replay in a dense model"),
    (frozenset({"experts"}), "llama", "", "the model has no experts; leave the flag out"),
    (frozenset({"nvfp4"}), "llama", "nvfp4", "NVFP4 quantises expert matrices only, and a dense model has none"),
    (frozenset({"ray"}), "", "", "the plugin is a runtime"),
    (frozenset({"endpoint", "tools"}), "", "", "agents are run by this rollout function only"),
    (frozenset({"true_on_policy", "cpu_kernels"}), "", "", "add in another order in decoding than in training"),
    (frozenset({"offline", "coevolution"}), "", "", "a step's games belong to the players of that step"),
    (frozenset({"offline", "ppo"}), "", "", "the other estimators compare samples of the policy"),
    *((frozenset({"offline", name}), "", "", "no engine generates any") for name in ("endpoint", "tools")),
    (frozenset({"offline", "reward_model"}), "", "", "no reward is computed"),
    (frozenset({"environments", "reward_model"}), "", "", "--environments supplies prompts and rewards"),
    *(
        (frozenset({"offline", "environments"}), "", "", why)
        for why in ("it reads the layouts", "no reward is computed")
    ),
    *(
        (frozenset({"offline", name}), "", "", "a run without an engine has none")
        for name in ("tis", "r3", "speculative", "zero_copy", "true_on_policy", "pass_at_k")
    ),
    *(
        (frozenset({"offline", name}), "", f"{name}xbf16", "no engine computes in the rollout's format")
        for name in FORMATS
    ),
    *(
        (frozenset({"true_on_policy", name}), "", f"{name}xbf16", "computes another function than a plain trainer")
        for name in FORMATS
    ),
    *((frozenset(two), "", "", "a run has one low-precision format") for two in combinations(FORMATS, 2)),
)

#: Drafting is tried with one family, in the cells that have one format on both sides.
DRAFTS = "speculative"
EXPECTED = ("train/grad_norm", "mismatch/abs_log_prob", "speculative/accept_length")
#: Plugins without a part that depends on the model's family, tried in pairs with one family.
ANY_FAMILY = {
    "coevolution",
    "distillation",
    "endless",
    "endpoint",
    "environments",
    "lora",
    "mxfp6",
    "offline",
    "ppo",
    "reward_model",
    "tools",
    "true_on_policy",
}
#: The most plugins in one run: when it fails, the reason has to be found among them.
GROUP = 5


def cells(names):
    """The precisions to run these plugins with: every pair a format's plugin supports, BF16 without one."""
    found = [(pair.rollout, pair.train) for name in names for pair in MANIFESTS[name].pairs]
    return found or [("bf16", "bf16")]


def expected(names, family, rollout, train):
    return [
        why
        for some, model, precision, why in REFUSED
        if some <= set(names) and model in ("", family) and precision in ("", rollout, f"{rollout}x{train}")
    ]


def is_tried(names, family, cell):
    """Whether the family and the precision are among those in which these plugins are tried."""
    if DRAFTS in names and (cell[0] != cell[1] or family == "llama"):
        return False
    return family == "qwen3_moe" or len(names) == 1 or (cell == cells(names)[0] and not ANY_FAMILY & set(names))


def runs_together(names, family, cell):
    return sum("policies" in MANIFESTS[name].toy for name in names) < 2 and not expected(names, family, *cell)


def cover(pairs, family, cell):
    """Group plugins so that each of ``pairs`` is part of a group: a run of five plugins tries ten pairs.

    The first pair that no group has yet begins one; whoever adds the most such pairs joins it.
    """
    left = dict.fromkeys(map(frozenset, pairs))
    while left:
        group = list(next(iter(left)))
        while len(group) < GROUP:
            gains = {
                name: sum(frozenset((name, member)) in left for member in group)
                for name in MANIFESTS
                if name not in group and runs_together([*group, name], family, cell)
            }
            best = max(gains, key=gains.__getitem__, default="")
            if not best or not gains[best]:
                break
            group.append(best)
        for pair in combinations(group, 2):
            left.pop(frozenset(pair), None)
        yield tuple(name for name in MANIFESTS if name in group)


def list_cases():
    """Every plugin alone, every pair that is refused, and all other pairs in groups."""
    every_cell = list(dict.fromkeys(cell for name in MANIFESTS for cell in cells([name])))
    for family in ("qwen3_moe", "llama"):
        yield from (
            ((name,), cell, family) for name in MANIFESTS for cell in cells([name]) if is_tried([name], family, cell)
        )
        for cell in every_cell:
            pairs = [p for p in combinations(MANIFESTS, 2) if cell in cells(p) and is_tried(p, family, cell)]
            yield from ((p, cell, family) for p in pairs if not runs_together(p, family, cell))
            yield from (
                (group, cell, family)
                for group in cover((p for p in pairs if runs_together(p, family, cell)), family, cell)
            )


CASES = list(list_cases())


@pytest.mark.parametrize(
    ("names", "cell", "family"),
    [
        # one family, every plugin alone and every second group are enough for each change
        pytest.param(*c, marks=pytest.mark.thorough if c[2] == "llama" or (len(c[0]) > 1 and n % 2) else ())
        for n, c in enumerate(CASES)
    ],
    ids=["+".join(n) + f"-{c[0]}x{c[1]}-{f}" for n, c, f in CASES],
)
def test_it_is_refused_with_the_reason_expected_or_it_runs(toy_run, names, cell, family):
    rollout, train = cell
    reasons = expected(names, family, rollout, train)
    options = {"rollout_precision": rollout, "train_precision": train, "emulate_precision": cell != ("bf16", "bf16")}
    options |= {flag: value for flag, value in toy_options(names, MANIFESTS).items() if flag != "runtime"}
    if reasons:
        with pytest.raises(PlanError) as refused:
            toy_run(names, family=family, steps=1, sizes=SIZES, **options)
        assert all(why in str(refused.value) for why in reasons), refused.value
        assert len(refused.value.problems) == len(reasons), refused.value
        return
    run = toy_run(names, family=family, steps=2, sizes=SIZES, **options)
    assert run.run.plan.order and set(names) <= set(run.run.plan.order)
    for record in run.metrics:
        # with several policies, metrics start with the policy's name
        values = {name: [v for key, v in record.items() if key.endswith(name)] for name in EXPECTED}
        assert record["rollout/samples"] == 8 and values["train/grad_norm"] and min(values["train/grad_norm"]) > 0
        assert DRAFTS not in names or values["speculative/accept_length"][0] > 1
        # one format on both sides, or none: what the engine sampled is what the trainer computes
        if rollout == train and run.engine is not None:
            assert max(values["mismatch/abs_log_prob"]) < 1e-3, (names, cell)
        if "true_on_policy" in names:
            assert max(values["mismatch/abs_log_prob"]) == 0, (names, cell)


def test_refusals_are_the_table_s():
    """No row without an installed plugin, so that the table is no longer than it needs to be."""
    assert all(names & set(MANIFESTS) for names, *_ in REFUSED)


def test_there_is_something_to_combine():
    assert {"r3", "tis", "fp8"} <= set(MANIFESTS)
