"""The primitives of a policy: equal to the loop's steps, and refusals that change nothing."""

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from miles_core.api import open_run, train
from miles_core.contracts.run import Policy
from miles_core.data.sample import Sample
from miles_core.errors import CheckpointError, ConfigError, DataError, MilesError
from miles_testing.toy import toy_files

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo.py"
ADAPTERS = {"plugins": ["lora"], "lora_sync": "adapter", "lora_target_modules": "all-linear"}


def files(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def opened(tmp_path, work, **options):
    """Run ``work(run, policy)`` in an open run."""

    async def main():
        model = str(toy_files() / "model")
        async with open_run(
            **{"hf_checkpoint": model, "save": tmp_path / "run", "log_level": "warning", **options}
        ) as run:
            return await work(run, run.policies["policy"])

    return asyncio.run(main())


def rows(count=4):
    random = np.random.default_rng(0)
    tokens = [random.integers(3, 30, 8).tolist() for _ in range(count)]
    samples = [Sample(tokens=t, response_length=4, index=i, group_index=i) for i, t in enumerate(tokens)]
    for sample in samples:
        sample.fields = {"advantages": [1.0, -1.0, 0.5, 2.0]}
    return samples


def test_grpo_of_primitives_has_the_numbers_of_miles_train(tmp_path):
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, prompts = str(toy_files() / "model"), str(toy_files() / "prompts.jsonl")
    history = asyncio.run(example.train(model, prompts, str(tmp_path / "primitives"), steps=2))
    done = train(
        hf_checkpoint=model,
        prompt_data=prompts,
        custom_rm_path=str(toy_files() / "reward.py"),
        rollout_batch_size=example.PROMPTS,
        n_samples_per_prompt=example.GROUP,
        num_rollout=2,
        save=tmp_path / "train",
        export_hf=str(tmp_path / "train" / "export"),
        quiet=True,
        **example.OPTIONS,
    )
    records = [record for record in done.metrics if record["step"] > 0]
    for own, record in zip(history, records, strict=True):
        assert {name: own[name] for name in ("train/loss", "train/grad_norm", "train/ratio")} == {
            name: record[name] for name in ("train/loss", "train/grad_norm", "train/ratio")
        }
    one, other = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("primitives", "train"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    start = load_file(Path(model) / "model.safetensors")
    assert not torch.equal(
        one["model.layers.0.self_attn.q_proj.weight"], start["model.layers.0.self_attn.q_proj.weight"]
    )


def test_a_state_is_loaded_and_saved_byte_for_byte(tmp_path):
    async def work(run, policy):
        await policy.forward_backward(rows(), "ppo")
        await policy.optimizer_step(1e-2)
        await policy.save_state(tmp_path / "a")
        await policy.forward_backward(rows(), "ppo")
        await policy.load_state(tmp_path / "a")
        with pytest.raises(MilesError, match="holds no gradients"):
            await policy.optimizer_step()
        await policy.save_state(tmp_path / "b")
        with pytest.raises(CheckpointError, match="exists; choose another directory"):
            await policy.save_state(tmp_path / "b")
        await policy.save_state(tmp_path / "b", overwrite=True)
        await policy.load_state(tmp_path / "a", optimizer=False)
        await policy.save_state(tmp_path / "c")

    opened(tmp_path, work)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    weights, moments = (f"trainer/{name}.safetensors" for name in ("model", "optimizer"))
    a, c = files(tmp_path / "a"), files(tmp_path / "c")
    assert a[weights] == c[weights] and a[moments] != c[moments]


def test_a_saved_state_is_complete_when_overwriting_it_is_interrupted(tmp_path, monkeypatch):
    def stop(path, *args, **kwargs):
        if (found := next(Path(path).rglob("*.safetensors"), None)) is not None:
            found.unlink()
            raise KeyboardInterrupt

    async def work(run, policy):
        await policy.save_state(tmp_path / "a")
        await policy.forward_backward(rows(), "ppo")
        await policy.optimizer_step(1e-2)
        with monkeypatch.context() as patch:
            patch.setattr("miles_core.primitives.shutil.rmtree", stop)
            with pytest.raises(KeyboardInterrupt):
                await policy.save_state(tmp_path / "a", overwrite=True)
        await policy.load_state(tmp_path / "a")
        await policy.save_state(tmp_path / "a", overwrite=True)

    opened(tmp_path, work)
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == ["a"]


def test_a_policy_whose_first_sync_fails_is_not_open(tmp_path, monkeypatch):
    async def fail(policy):
        raise MilesError("no space on the device")

    async def work(run, policy):
        with monkeypatch.context() as patch:
            patch.setattr(type(policy), "sync", fail)
            with pytest.raises(MilesError, match="no space"):
                await run.add(Policy(name="other", generates=True))
        assert run.policies == {"policy": policy}
        await run.add(Policy(name="other", generates=True))

    opened(tmp_path, work)


def test_policies_come_and_go(tmp_path):
    async def work(run, policy):
        other = await run.add(Policy(name="other", generates=False, options={"lora.rank": 2}))
        with pytest.raises(ConfigError, match="the policy other is open already"):
            await run.add(Policy(name="other"))
        before = await other.log_probs(rows())
        await policy.forward_backward(rows(), "importance_sampling")
        await policy.optimizer_step(1e-2)
        np.testing.assert_array_equal(before, await other.log_probs(rows()))
        assert not np.array_equal(before, await policy.log_probs(rows()))
        await policy.save_state(tmp_path / "state")
        with pytest.raises(CheckpointError, match=r"saved with lora\.rank = 8, and the policy other has 2"):
            await other.load_state(tmp_path / "state")
        with pytest.raises(ConfigError, match="has no engine"):
            await other.sample([5])
        await run.remove("other")
        assert [each.name for each in run.run.policies] == ["policy"]
        again = await run.add(Policy(name="other", generates=False, options={"lora.rank": 2}))
        np.testing.assert_array_equal(before, await again.log_probs(rows()))

    opened(tmp_path, work, **ADAPTERS)


def test_samples_continue_over_a_sync(tmp_path):
    async def work(run, policy):
        asked = asyncio.ensure_future(policy.sample([5, 6, 7], 4))
        await asyncio.sleep(0.01)
        await policy.forward_backward(rows(), "ppo")
        await policy.optimizer_step(1e-2)
        await policy.sync()
        found = await asked
        assert all(len({version for _, version in sample.weight_versions}) == 1 for sample in found)
        scores = await policy.score([list(found[0].tokens)])
        assert len(scores[0]) == len(found[0].tokens) - 1

    opened(tmp_path, work, rollout_max_response_len=64)


@pytest.mark.parametrize(
    ("change", "loss", "settings", "error", "text"),
    [
        ({}, "grpo", {}, ConfigError, "there is no loss 'grpo'; the losses are policy, cross_entropy"),
        ({}, "ppo", {"clip": 1}, ConfigError, "the loss ppo has no setting 'clip'; it has clip_low_threshold"),
        ({}, "policy", {"clip": 1}, ConfigError, "has the settings of the run"),
        ({}, "dro", {}, ConfigError, "needs the setting beta"),
        ({"fields": {}}, "ppo", {}, DataError, "sample 0 has no advantages, which the loss ppo reads"),
        ({"fields": {"advantages": [1.0]}}, "ppo", {}, DataError, "has 1 rows, expected 4"),
        ({"fields": {"advantages": [np.inf] * 4}}, "ppo", {}, DataError, "values in advantages that are not finite"),
        ({"tokens": [99_999] * 8}, "cross_entropy", {}, DataError, "sample 0 has the token 99999"),
    ],
)
def test_an_invalid_call_changes_nothing(tmp_path, change, loss, settings, error, text):
    async def work(run, policy):
        samples = rows()
        for name, value in change.items():
            setattr(samples[0], name, value)
        with pytest.raises(error) as caught:
            await policy.forward_backward(samples, loss, settings)
        assert text in str(caught.value)
        with pytest.raises(MilesError, match="holds no gradients"):
            await policy.optimizer_step()

    opened(tmp_path, work)


def test_prompts_are_checked(tmp_path):
    async def work(run, policy):
        for prompt, text in (([], "the prompt has no tokens"), ([99_999], "the prompt has the token 99999")):
            with pytest.raises(DataError) as caught:
                await policy.sample(prompt)
            assert text in str(caught.value)
        with pytest.raises(DataError, match="received no sample"):
            await policy.forward_backward([], "ppo")

    opened(tmp_path, work)
