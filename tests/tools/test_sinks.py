import importlib.machinery
import sys
import types

import pytest

from miles_core.config.load import load
from miles_core.config.schema import collect
from miles_core.errors import ConfigError, MilesError
from miles_tools import sinks
from miles_tools.sinks import Sinks, TensorBoard, WeightsAndBiases, check_wandb_login, examine


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


def test_a_login_that_fails_is_one_line(tmp_path, monkeypatch):
    def init(**kwargs):
        raise RuntimeError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(MilesError) as raised:
        WeightsAndBiases(tmp_path, "run", {}, "miles")
    text = str(raised.value)
    assert "\n" not in text and "No API key configured" in text and "WANDB_MODE=offline" in text
    assert not (tmp_path / "wandb_id").exists()


@pytest.mark.parametrize("login", [None, "variable", "netrc", "settings", "terminal"])
def test_a_missing_login_is_found_before_the_run(tmp_path, monkeypatch, login):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: login == "terminal", raising=False)
    if login == "variable":
        monkeypatch.setenv("WANDB_API_KEY", "key")
    elif login == "netrc":
        (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key")
    elif login == "settings":
        (tmp_path / "wandb").mkdir()
        (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    if login is not None:
        check_wandb_login()
        return
    with pytest.raises(MilesError, match=r"no login of Weights & Biases was found.*wandb login"):
        check_wandb_login()


def test_a_run_whose_sink_fails_records_how_it_ended(tmp_path, monkeypatch):
    from miles_testing import toy_run
    from miles_tools.report.report import report

    done = toy_run(directory=tmp_path / "run", steps=1).run.directory
    assert "finished" in (done / "ending.json").read_text()

    def init(**kwargs):
        raise RuntimeError("No API key configured.")

    module = types.ModuleType("wandb")
    module.init = init
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_API_KEY", "refused")
    with pytest.raises(MilesError, match="No API key configured") as raised:
        toy_run(directory=done, steps=3, load=str(done), use_wandb=True)
    assert "report: miles report" in "".join(raised.value.__notes__)
    page = report(done).read_text()
    assert "1 of 3 steps are complete" in page and "No API key configured" in page and "It finished" not in page


def test_a_plan_needs_no_package_of_a_sink(monkeypatch):
    monkeypatch.setattr(sinks, "find_spec", lambda package: None)
    config = load(["--use-wandb", "--prompt-data", "none.jsonl"])
    assert config.sinks == Sinks(use_wandb=True)
    examine(config, False)
    with pytest.raises(ConfigError, match="--use-wandb needs the package 'wandb', which is not installed"):
        examine(config, True)


def test_the_options_belong_to_the_sinks():
    schema = load([]).schema
    flags = {option.flag for option in schema.options.values() if option.group == "sinks"}
    names = "use-wandb wandb-project wandb-group wandb-name use-tensorboard alert-command alert-webhook"
    assert flags == {f"--{name}" for name in names.split()}
    assert not [path for path in collect([]).options if "wandb" in path or "tensorboard" in path]
    with pytest.raises(ConfigError, match=r"^--wandb-group a: it needs sinks\.use_wandb, and --use-wandb is false"):
        load(["--wandb-group", "a"])
    assert load(["--use-wandb"]).to_dict()["sinks"] == {"use_wandb": True}


def test_a_run_that_was_saved_with_these_options_in_the_table_run_goes_on(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text(
        "run:\n  use_wandb: true\n  wandb_group: mine\ndefaults:\n  run:\n    wandb_project: theirs\n    use_tensorboard: true\n"
    )
    config = load(["--load", str(tmp_path)])
    assert config.sinks == Sinks(use_wandb=True, wandb_group="mine", wandb_project="theirs", use_tensorboard=True)
    assert config.is_set("sinks.use_wandb") and not config.is_set("sinks.wandb_project")
    with pytest.raises(ConfigError, match=r"the table run has no key 'wandb_group'; there is sinks\.wandb_group"):
        load(["--config", str(tmp_path / "config.yaml")])


def test_a_saved_default_of_an_option_that_is_gone_is_ignored_with_a_warning(tmp_path, caplog):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("defaults:\n  run:\n    gone_option: 3\n")
    load(["--load", str(tmp_path)])
    assert "the default of run.gone_option is ignored: there is no such option any more" in caplog.text
    (tmp_path / "config.yaml").write_text("run:\n  gone_option: 3\n")
    with pytest.raises(ConfigError, match="the table run has no key 'gone_option'"):
        load(["--load", str(tmp_path)])
