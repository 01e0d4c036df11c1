"""Log-probabilities of engine and trainer are equal to the last bit, and those of a run without the plugin are not."""

from importlib.resources import files

import pytest
import torch

#: A runtime with trainer and engines in separate processes, loaded by its path.
REMOTE = str(files("miles_testing") / "doubles" / "remote.py")
MXFP8 = {"moe_intermediate_size": 32}
FORMATS = {
    "fp8": {},
    "mxfp8": {"sizes": MXFP8},
    "nvfp4": {},
    "int4": {"int4_group_size": 16},
}
SPLITS = ({"micro_batch_size": 3}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 16})


def gaps(run):
    """The largest difference of a token in each step, after a comparison with the mean."""
    means, largest = ([r[f"mismatch/abs_log_prob{end}"] for r in run.metrics] for end in ("", "_max"))
    assert all(mean <= most and (mean == 0) == (most == 0) for mean, most in zip(means, largest, strict=True))
    return largest


def weights_after(run):
    return {name: value.clone() for name, value in run.trainer.model.state_dict().items()}


def assert_same_bits(one, two):
    left, right = weights_after(one), weights_after(two)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.fixture(params=[2, 3])
def several_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_gap_is_zero_and_without_the_plugin_it_is_not(toy_run, family, dtype):
    exact = toy_run(["true_on_policy"], family=family, dtype=dtype, rollout_max_response_len=9)
    plain = toy_run(family=family, dtype=dtype, rollout_max_response_len=9, steps=1)
    assert gaps(exact) == [0.0, 0.0] and gaps(plain)[0] > 0
    assert all(record["train/grad_norm"] > 0 for record in exact.metrics)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_micro_batches_and_requests_change_nothing(toy_run, split, on_device):
    run = toy_run(["true_on_policy"], steps=1, max_running_requests=3, n_samples_per_prompt=5, **split, **on_device)
    assert gaps(run) == [0.0]


def test_several_threads_sample_and_score_the_same(toy_run, several_threads):
    run = toy_run(["true_on_policy"], steps=1, rollout_max_response_len=9)
    torch.set_num_threads(1)
    alone = toy_run(["true_on_policy"], steps=1, rollout_max_response_len=9)
    assert gaps(run) == gaps(alone) == [0.0]
    found, expected = ([s["rollout_log_probs"] for s in each.samples] for each in (run, alone))
    assert found == expected


@pytest.mark.parametrize("name", FORMATS)
def test_formats_on_both_sides(toy_run, name):
    options = {"rollout_precision": name, "train_precision": name, "emulate_precision": True, **FORMATS[name]}
    assert gaps(toy_run([name, "true_on_policy"], dtype="bfloat16", **options)) == [0.0, 0.0]


@pytest.mark.parametrize(
    "options",
    [
        {"rollout_temperature": 0.7, "rollout_top_p": 0.9},
        {"rollout_top_k": 5, "entropy_coef": 0.01, "num_steps_per_rollout": 2},
        {"recompute_activations": True, "kl_loss_coef": 0.1},
    ],
    ids=lambda options: "+".join(options),
)
def test_options_of_sampling_and_training(toy_run, options):
    assert gaps(toy_run(["true_on_policy"], **options)) == [0.0, 0.0]


def test_adapters_next_to_the_base(toy_run):
    run = toy_run(["lora", "true_on_policy"], lora_sync="adapter")
    assert gaps(run) == [0.0, 0.0]


@pytest.mark.parametrize("other", ["tis", "r3"])
def test_corrections_and_replay_are_the_identity(toy_run, other, on_device):
    sides = (["true_on_policy"], ["true_on_policy", other])
    alone, both = (toy_run(plugins, steps=1, lr=1e-2, **on_device) for plugins in sides)
    assert_same_bits(alone, both)
    assert gaps(both) == [0.0]
    if other == "tis":
        assert both.metrics[0]["tis/ess"] == 1.0


def test_without_the_plugin_a_correction_is_not(toy_run, on_device):
    run = toy_run(["tis"], steps=1, lr=1e-2, **on_device)
    assert gaps(run) != [0.0] and run.metrics[0]["tis/ess"] != 1.0


def test_tokens_of_partial_rollouts_that_have_the_trained_weights(toy_run, on_device):
    run = toy_run(["true_on_policy"], partial_rollout=True, over_sampling_batch_size=4, lr=0.0, **on_device)
    assert gaps(run) == [0.0, 0.0]


def test_engines_and_a_trainer_in_other_processes(toy_run, on_device):
    run = toy_run([REMOTE, "true_on_policy"], runtime="remote", remote_engines=2, **{"dtype": "bfloat16", **on_device})
    assert gaps(run) == [0.0, 0.0]


def test_an_engine_and_a_trainer_that_take_turns_on_one_device(toy_run, on_device):
    options = {"dtype": "bfloat16", **on_device}
    run = toy_run(["true_on_policy"], colocate=True, rollout_max_response_len=9, **options)
    assert gaps(run) == [0.0, 0.0]
    assert all("time/colocate" in record for record in run.metrics)  # both sides released and took back their memory


def test_a_resumed_run(toy_run, on_device):
    whole, first = (toy_run(["true_on_policy"], steps=steps, **on_device) for steps in (2, 1))
    resumed = toy_run(["true_on_policy"], load=first.directory, **on_device)
    assert gaps(resumed)[-1] == 0.0
    assert_same_bits(whole, resumed)
