import sys
import types

import pytest

from miles_core.errors import MilesError
from miles_core.observe.sinks import TensorBoard, WeightsAndBiases


def test_missing_packages_name_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MilesError, match=r"--use-wandb needs the package 'wandb'.*pip install wandb"):
        WeightsAndBiases(tmp_path, "run", {}, "miles")
    with pytest.raises(MilesError, match=r"--use-tensorboard needs .*pip install tensorboard"):
        TensorBoard(tmp_path)


def test_metrics_reach_the_packages(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, log_dir):
            calls.append(("open", log_dir))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    sink = TensorBoard(tmp_path)
    sink.write(2, {"a": 1.0})
    sink.close()
    assert calls == [("open", str(tmp_path)), ("a", 1.0, 2), "closed"]

    seen = {}

    class Run:
        id = "a1b2"

        def log(self, metrics, step):
            seen["log"] = (metrics, step)

        def finish(self):
            seen["finished"] = True

    def init(**kwargs):
        seen["init"] = kwargs
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    sink = WeightsAndBiases(tmp_path, "run-1", {"lr": 0.1}, "mine", "sweep")
    assert seen["init"]["id"] is None
    sink.write(5, {"a": 1.0})
    sink.close()
    assert seen["init"]["project"] == "mine"
    assert seen["init"]["config"] == {"lr": 0.1}
    assert seen["log"] == ({"a": 1.0}, 5)
    assert seen["finished"]
    WeightsAndBiases(tmp_path, "run-1", {}, "mine", "sweep")
    assert seen["init"]["id"] == "a1b2" and seen["init"]["group"] == "sweep"  # continued, not a second run
