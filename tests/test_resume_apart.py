"""``miles train`` in processes of its own, on a GPU where one is: stopped and continued, it has the bits of a run that never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from miles_core.observe.metrics import read
from miles_testing.toy import toy_arguments
from miles_tools.samples.files import read_rollouts

COMMAND = "import sys\nfrom miles_core.cli.main import main\nsys.exit(main(['train', *sys.argv[1:]]))"
#: Long enough for several blocks of keys in attention, wide enough for grouped products of experts.
SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
COMMON = {
    "dtype": "bfloat16",
    "embedded_deterministic": True,
    "rollout_shuffle": True,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 160,
    "num_steps_per_rollout": 2,
    "entropy_coef": 0.01,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 8,
    "log_level": "error",
}
#: Name -> plugins, family and options.
RUNS = {
    "dense": ([], "qwen3", {"sizes": {**SIZES, "intermediate_size": 256}, "rollout_top_p": 0.95}),
    "moe": (
        ["r3", "tis"],
        "qwen3_moe",
        {
            "sizes": {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            "over_sampling_batch_size": 6,
            "dynamic_sampling_filter_path": "nonzero_std",
            "recompute_activations": True,
        },
    ),
}
#: Parts of names of metrics that depend on the clock or on what else is in the GPU's memory.
_MEASURED = ("time", "second", "memory", "peak")


def start(name, device, directory, steps, **options):
    """Start ``miles train`` for ``steps`` steps in all."""
    plugins, family, more = RUNS[name]
    words = toy_arguments(plugins, directory, steps, family, device=device, **COMMON, **more, **options)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", COMMAND, *words], stderr=subprocess.PIPE, text=True, env=environment)


def finish(processes):
    for process in processes:
        _, text = process.communicate(timeout=300)
        assert process.returncode == 0, text[-3000:]


def result(directory):
    """Metrics, rollouts, and every tensor and number of the last checkpoint."""
    root = directory / "checkpoints" / "step_00000004"
    metrics = [
        {name: value for name, value in record.items() if not any(word in name for word in _MEASURED)}
        for record in read(directory / "metrics.jsonl")
    ]
    tensors = {
        (path.relative_to(root).as_posix(), name): tensor
        for path in root.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    return metrics, list(read_rollouts(directory)), json.loads((root / "state/run.json").read_text()), tensors


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.thorough),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_two_steps_and_two_more_equal_four_in_other_processes(device, tmp_path):
    """All runs at once, because most of the time is their start."""
    finish([start(name, device, tmp_path / f"{name}-{steps}", steps) for name in RUNS for steps in (4, 2)])
    finish([start(name, device, None, 4, load=tmp_path / f"{name}-2", save=None) for name in RUNS])
    for name in RUNS:
        (metrics, rollouts, state, tensors), found = result(tmp_path / f"{name}-4"), result(tmp_path / f"{name}-2")
        assert len(metrics) == 4 and all(record["train/grad_norm"] > 0 for record in metrics)
        assert max(len(sample["tokens"]) for sample in rollouts) > 100
        assert found[:3] == (metrics, rollouts, state), name
        assert found[3].keys() == tensors.keys()
        assert not [key for key, tensor in tensors.items() if not torch.equal(tensor, found[3][key])], name
