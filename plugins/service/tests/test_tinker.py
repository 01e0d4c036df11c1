"""The package ``tinker`` (pinned in pyproject.toml) as the client, and the cookbook's examples, unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from miles_service.testing import TOKEN, base

try:
    import tinker
    from tinker import types
except ImportError:
    tinker = types = None

pytestmark = pytest.mark.skipif(tinker is None, reason="the package tinker is not installed")


@pytest.fixture
def clients(server):
    made = tinker.ServiceClient(base_url=server.address, api_key=TOKEN)
    yield made
    made.close("success").result()


def datum(tokens, prompt=2):
    weights = [0.0] * (prompt - 1) + [1.0] * (len(tokens) - prompt)
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_the_life_of_a_model(clients):
    training = clients.create_lora_training_client(base_model=base(), rank=4).result()
    assert training.get_info().lora_rank == 4 and len(training.get_tokenizer()) > 100
    data = [datum([5, 6, 7, 8, 9]), datum([5, 6, 11, 12])]
    losses = []
    for _ in range(3):
        gradients = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(gradients.result().metrics["loss:sum"])
        assert step.result().metrics["lr"] == 1e-2
    assert losses[0] > losses[1] > losses[2]
    sampling = training.save_weights_and_get_sampling_client().result()
    found = sampling.sample(types.ModelInput.from_ints([5, 6]), 3, types.SamplingParams(max_tokens=5, stop=[])).result()
    assert [len(each.tokens) for each in found.sequences] == [5, 5, 5]
    assert {each.stop_reason for each in found.sequences} == {"length"}
    text = [5, 6, *found.sequences[0].tokens]
    scores = sampling.compute_logprobs(types.ModelInput.from_ints(text)).result()
    assert scores[0] is None
    np.testing.assert_allclose(scores[2:], found.sequences[0].logprobs, atol=1e-5)
    forward = training.forward([datum(text)], "cross_entropy").result()
    np.testing.assert_allclose(forward.loss_fn_outputs[0]["logprobs"].tolist(), scores[1:], atol=1e-5)
    path = training.save_state("kept").result().path
    again = clients.create_training_client_from_state_with_optimizer(path).result()
    assert (
        again.forward(data, "cross_entropy").result().metrics
        == training.forward(data, "cross_entropy").result().metrics
    )
    named = training.save_weights_for_sampler("named").result().path
    other = clients.create_sampling_client(model_path=named).result()
    assert other.compute_logprobs(types.ModelInput.from_ints(text)).result() == scores


def test_a_loss_of_the_client(clients):
    """``forward_backward_custom`` computes the loss in the client, and sends its gradient as weights."""
    one, other = (clients.create_lora_training_client(base_model=base(), rank=2, seed=1).result() for _ in range(2))
    data = [datum([5, 6, 7, 8, 9])]

    def loss(data, log_probs):
        mask = np.asarray(data[0].loss_fn_inputs["weights"].tolist())
        value = -(log_probs[0] * log_probs[0].new_tensor(mask)).sum()
        return value, {"mine": float(value)}

    metrics = one.forward_backward_custom(data, loss).result().metrics
    expected = other.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    assert metrics["mine"] == pytest.approx(expected)
    norms = [each.optim_step(types.AdamParams()).result().metrics["grad_norm"] for each in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_refusals_reach_the_user(clients, server):
    training = clients.create_lora_training_client(base_model=base(), rank=4).result()
    with pytest.raises(
        tinker.RequestFailedError, match="the loss 'gspo' is not supported; the losses are cross_entropy"
    ):
        training.forward_backward([datum([5, 6, 7])], "gspo").result()
    with pytest.raises(tinker.RequestFailedError, match="holds no gradients; call forward_backward first"):
        training.optim_step(types.AdamParams()).result()
    with pytest.raises(tinker.BadRequestError, match="and no 'another/model'"):
        clients.create_lora_training_client(base_model="another/model").result()
    with pytest.raises(tinker.AuthenticationError, match="TINKER_API_KEY"):
        tinker.ServiceClient(base_url=server.address, api_key="tml-wrong").create_sampling_client(base_model=base())


#: Files in the place of data sets of a hub, which ``datasets`` finds in the working directory.
CARD = "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/*.json}\n  - {split: test, path: main/*.json}\n---\n"
RECIPES = {
    "sl_loop": "batch_size=4 save_every=1 max_steps=2",
    "rl_loop": "batch_size=4 group_size=4 max_tokens=8 loss_fn=importance_sampling max_steps=2",
    "math_rl.train": "env=gsm8k group_size=4 groups_per_batch=4 max_tokens=8 eval_every=0 max_steps=2 loss_fn=ppo",
}


@pytest.fixture(scope="module")
def cookbook(serve, tmp_path_factory):
    """A directory with a tiny model under a hub's name and data sets, and a server of the model."""
    pytest.importorskip("tinker_cookbook", reason="the package tinker-cookbook is not installed")
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    from miles_testing.toy import toy_files

    directory = tmp_path_factory.mktemp("cookbook")
    model = directory / "Qwen" / "Qwen3-8B-Base"
    model.parent.mkdir()
    model.symlink_to(toy_files("qwen3", max_position_embeddings=2048) / "model")
    chats = [[{"role": "user", "content": f"say {c}"}, {"role": "assistant", "content": c * 3}] for c in "abcdefgh" * 2]
    questions = [{"question": f"What is {i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(16)]
    write(directory / "HuggingFaceH4/no_robots/train.json", [{"messages": each} for each in chats])
    write(directory / "openai/gsm8k/main/data.json", questions)
    (directory / "openai/gsm8k/README.md").write_text(CARD)
    return directory, serve(checkpoint=model)


def write(file, rows):
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_of_the_cookbook_run_unchanged(cookbook, recipe, tmp_path):
    directory, server = cookbook
    server.service.base = "Qwen/Qwen3-8B-Base"
    words = [f"model_name={server.service.base}", f"log_path={tmp_path}/log", "lora_rank=4", *RECIPES[recipe].split()]
    environment = {"TINKER_BASE_URL": server.address, "TINKER_API_KEY": TOKEN, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *words]
    done = subprocess.run(
        command, cwd=directory, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in Path(tmp_path, "log/metrics.jsonl").read_text().splitlines()]
    assert len(records) >= 2
    if recipe == "sl_loop":
        assert records[0]["train_mean_nll"] > records[-1]["train_mean_nll"]
