"""Weights that are not finite are named, and never saved."""

from __future__ import annotations

import pytest
import torch

from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import NonFiniteError
from miles_core.train.finite import SYNC_EVERY, first_nonfinite

#: Makes all weights NaN in the third step, after the gradient was found to be finite.
DIVERGES = """
import torch
from miles_core.plugin import hookimpl

@hookimpl
def wrap_optimizer_step(run, policy):
    def wrap(inner):
        def step():
            found = inner()
            if run.step == 2:
                with torch.no_grad():
                    for parameter in MODEL[0].parameters():
                        parameter.fill_(float("nan"))
            return found
        return step
    return wrap

MODEL = []

@hookimpl
def on_model(run, policy, model, role):
    if role != "rollout":
        MODEL[:] = [model]
"""


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, SYNC_EVERY - 1, SYNC_EVERY, 2 * SYNC_EVERY + 3])
def test_the_first_bad_weight_is_named(bad, at):
    tensors = {f"w{n}": torch.ones(3, dtype=torch.bfloat16) for n in range(2 * SYNC_EVERY + 4)}
    tensors |= {"counts": torch.ones(2, dtype=torch.int64), "none": torch.empty(0)}
    assert first_nonfinite([WeightUnit({name: tensor}) for name, tensor in tensors.items()]) is None
    tensors[f"w{at}"][1] = bad
    assert first_nonfinite([WeightUnit({name: tensor}) for name, tensor in tensors.items()]) == f"w{at}"


def test_large_weights_are_finite():
    assert first_nonfinite([WeightUnit({"w": torch.full((1000,), 3e38)})]) is None


def test_a_step_that_diverged_is_not_saved_and_the_last_good_one_is_kept(toy_run, tmp_path):
    (tmp_path / "diverges.py").write_text(DIVERGES)
    with pytest.raises(NonFiniteError, match=r"step 3 is not saved: its weight model\.\S+ holds NaN"):
        toy_run([str(tmp_path / "diverges.py")], directory=tmp_path / "run", steps=4, save_interval=1, keep=1)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000002"]
