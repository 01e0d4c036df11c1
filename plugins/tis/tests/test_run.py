"""tis in real runs: what is asked of the trainer, and that the result does not depend on how a step is split."""

import pytest
import torch

from miles_core.config.groups import Algorithm
from miles_core.data import Sample, collate
from miles_core.plugin import ConfigError, DataError, PlanError, PluginError
from miles_core.train.loss import PolicyLoss
from miles_core.trainer import Output
from miles_embedded.trainer.trainer import EmbeddedTrainer
from miles_tis.config import TisConfig
from miles_tis.correction import correct

#: The engine's log-probabilities as if it were another model: token-dependent, the same in every run.
DISTORTED = """
from miles_core.plugin import hookimpl

@hookimpl
def on_sample(sample):
    n = sample.response_length
    sample.rollout_log_probs = [p - 0.3 * ((t * 7) % 5 - 2) for p, t in zip(sample.rollout_log_probs, sample.tokens[-n:])]
"""
WHOLE_STEP = """
from miles_core.plugin import hookimpl
from miles_core.trainer import Needs, compose_corrections
from miles_core.algorithm.correction import identity

@hookimpl
def wrap_correction():
    return lambda inner: compose_corrections(inner, identity, Needs(whole_step=True))
"""
OPTIONS = [
    {"tis_mode": "truncate", "tis_clip": 1.1},
    {"tis_level": "sequence", "tis_mode": "mask", "tis_threshold": 2.0},
    {"tis_level": "geometric", "tis_batch_normalize": True, "tis_reject": "token", "tis_reject_low": 0.6},
]


@pytest.fixture
def distorted(tmp_path):
    path = tmp_path / "distorted.py"
    path.write_text(DISTORTED)
    return str(path)


@pytest.fixture
def passes(monkeypatch):
    """The kinds of the passes without gradient."""
    made = []
    original = EmbeddedTrainer.log_probs

    def counted(self, batch, kind, entropy=False):
        made.append(kind)
        return original(self, batch, kind, entropy)

    monkeypatch.setattr(EmbeddedTrainer, "log_probs", counted)
    return made


def weights_after(run):
    units = run.trainer.model.state_dict()
    return {name: value.clone() for name, value in units.items()}


def assert_same(one, two, names=("tis/", "mismatch/", "train/loss", "train/grad_norm")):
    for a, b in zip(one.metrics, two.metrics, strict=True):
        chosen = {n: v for n, v in a.items() if n.startswith(names)}
        assert len(chosen) > 5
        assert {n: b[n] for n in chosen} == pytest.approx(chosen, rel=2e-4, abs=1e-6)
    left, right = weights_after(one), weights_after(two)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS)
def test_packing_and_micro_batches_change_nothing(toy_run, distorted, options):
    plain = toy_run([distorted, "tis"], steps=1, clip_grad=0, **options)
    assert plain.metrics[0]["tis/ess"] < 0.999
    for split in ({"micro_batch_size": 3}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 16}):
        assert_same(plain, toy_run([distorted, "tis"], steps=1, clip_grad=0, **options, **split))


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_the_pass_that_is_spared_changes_nothing(toy_run, distorted, passes, tmp_path, options):
    whole = tmp_path / "whole.py"
    whole.write_text(WHOLE_STEP)
    spared = toy_run([distorted, "tis"], steps=1, clip_grad=0, **options)
    assert passes == []
    made = toy_run([distorted, "tis", str(whole)], steps=1, clip_grad=0, **options)
    assert passes == ["old"]
    assert_same(spared, made)


@pytest.mark.parametrize(
    ("plugins", "options", "expected"),
    [
        (["tis"], {}, []),
        (["tis"], {"tis_batch_normalize": True}, ["old"]),
        (["tis"], {"num_steps_per_rollout": 2}, ["old"]),
        ([], {"use_opsm": True}, []),
        # the first optimiser step starts from the old policy, so only the second needs a pass of its own
        ([], {"use_opsm": True, "num_steps_per_rollout": 2}, ["old", "old"]),
        ([], {"use_rollout_logprobs": True, "num_steps_per_rollout": 2}, []),
        ([], {"use_rollout_logprobs": True, "use_opsm": True, "num_steps_per_rollout": 2}, ["old", "old"]),
    ],
)
def test_no_pass_is_made_that_nothing_needs(toy_run, passes, plugins, options, expected):
    run = toy_run(plugins, steps=1, **options)
    assert passes == expected
    assert (
        run.metrics[0]["mismatch/abs_log_prob"] < 1e-4
    )  # of the first optimiser step: without the policy's own change


def test_on_policy_data_is_left_alone(toy_run):
    plain = toy_run(steps=1, num_steps_per_rollout=2)
    both = toy_run(["tis"], steps=1, num_steps_per_rollout=2, tis_batch_normalize=True, tis_veto=True)
    left, right = weights_after(plain), weights_after(both)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-5)
    assert both.metrics[0]["tis/ess"] == pytest.approx(1, abs=1e-5)
    assert both.metrics[0]["tis/ppl_ratio"] == pytest.approx(1, abs=1e-4)


def test_opsm_drops_once_the_policy_has_moved(toy_run):
    run = toy_run(steps=1, use_opsm=True, opsm_delta=0.0, num_steps_per_rollout=2, lr=3e-2)
    assert 0 < run.metrics[0]["tis/fraction_opsm"] < 1
    assert "tis/weight_mean" not in run.metrics[0]


def test_metrics_only_trains_as_without_the_plugin(toy_run, distorted):
    plain = toy_run([distorted], steps=1)
    watched = toy_run([distorted], steps=1, get_mismatch_metrics=True, tis_mode="mask", tis_threshold=1.1)
    assert watched.metrics[0]["tis/fraction_masked_high"] > 0
    for name, value in weights_after(plain).items():
        assert torch.equal(value, weights_after(watched)[name]), name


@pytest.mark.parametrize("sampling", [{"rollout_top_k": 3}, {"rollout_top_p": 0.7}, {"rollout_temperature": 0.7}])
def test_ratios_are_those_of_the_distribution_that_was_sampled(toy_run, sampling):
    record = toy_run(["tis"], steps=1, tis_mode="mask", tis_threshold=1.01, **sampling).metrics[0]
    assert record["tis/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert record["tis/fraction_masked_high"] == record["tis/fraction_masked_low"] == 0


def test_bypass_mode_has_nothing_to_compare(toy_run):
    for options in ({"use_tis": True}, {"get_mismatch_metrics": True}):
        with pytest.raises(PlanError, match="bypass mode"):
            toy_run(use_rollout_logprobs=True, **options)


def test_bypass_mode_refuses_any_correction_that_compares(toy_run, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(WHOLE_STEP.replace("whole_step=True", "old=True"))
    with pytest.raises(ConfigError, match=r"remove one of the two"):
        toy_run([str(path)], use_rollout_logprobs=True)


def test_bypass_mode_takes_the_ratio_to_the_engine(toy_run, distorted):
    """On distorted log-probabilities the first optimiser step already clips, which it never does on its own policy."""
    plain = toy_run([distorted], steps=1)
    bypass = toy_run([distorted], steps=1, use_rollout_logprobs=True)
    assert plain.metrics[0]["train/clip_fraction_high"] == 0
    assert bypass.metrics[0]["train/clip_fraction_high"] > 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tis_clip": 0.5}, "--tis-clip"),
        ({"tis_clip_low": 1.5}, "--tis-clip-low"),
        ({"tis_threshold": 0.0}, "--tis-threshold"),
        ({"tis_reject": "token"}, "no bounds"),
        ({"tis_reject": "token", "tis_reject_high": 0.5}, "--tis-reject-high"),
    ],
)
def test_bounds_are_refused_before_anything_is_built(toy_run, passes, options, words):
    with pytest.raises(ConfigError, match=words):
        toy_run(["tis"], **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sample.rollout_log_probs = None", "has no rollout_log_probs"),
        ("sample.rollout_log_probs = sample.rollout_log_probs[:-1]", "entries for"),
        ("sample.rollout_log_probs[0] = float('-inf')", r"rollout_log_probs\[0\] is -inf"),
    ],
)
def test_log_probs_that_cannot_be_used_are_refused(toy_run, tmp_path, change, words):
    path = tmp_path / "broken.py"
    path.write_text(f"from miles_core.plugin import hookimpl\n\n@hookimpl\ndef on_sample(sample):\n    {change}\n")
    with pytest.raises((DataError, PluginError), match=words):
        toy_run([str(path), "tis"], steps=1)


def test_a_sum_over_the_step_is_refused_where_there_is_none(toy_run, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from miles_core.plugin import hookimpl\nfrom miles_core.trainer import Needs, compose_corrections\n"
        "from miles_core.algorithm.correction import identity\n\n"
        "def own(inputs):\n    inputs.sum(inputs.mask.sum())\n    return identity(inputs)\n\n"
        "@hookimpl\ndef wrap_correction():\n"
        "    return lambda inner: compose_corrections(inner, own, Needs(whole_step=False))\n"
    )
    with pytest.raises(PluginError, match="whole_step=True"):
        toy_run([str(path)], steps=1)


def test_a_batch_that_trains_nothing_needs_no_log_probs():
    """As on a data-parallel rank that has no samples of the step."""
    ones, column = torch.ones(3), torch.zeros(3)
    batch = collate([Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[0, 0])])
    batch.columns |= {"advantages": ones, "loss_weight": column}
    options = TisConfig(use=True)
    loss = PolicyLoss(Algorithm(), correct=lambda inputs: correct(inputs, options))
    found = loss(Output(log_probs=column.requires_grad_()), batch, None)
    assert float(found.value.detach()) == 0 and float(found.metrics["tis/ratio_mean"][1]) == 0
