import io

from rich.console import Console

from miles_core.observe import log as logs
from miles_core.observe import terminal as module
from miles_core.observe.terminal import TerminalProgress

METRICS = {
    "reward/mean": 0.5,
    "rollout/length_mean": 8.25,
    "train/loss": 0.01,
    "time/rollout": 0.2,
    "time/train": 0.5,
    "time/step": 0.8,
}


def plain_run(caplog, steps, **kwargs):
    console = Console(file=io.StringIO(), force_terminal=False)
    with caplog.at_level("INFO"), TerminalProgress(steps, console, **kwargs) as progress:
        for _ in range(kwargs.get("start", 0), steps):
            progress.phase("rollout", total=4)
            progress.advance(4)
            progress.step(METRICS)
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("step")]


def test_without_a_terminal_first_and_last_steps_are_logged(caplog):
    lines = plain_run(caplog, 50, every=1000)
    assert [line[5:10].strip() for line in lines] == ["1/50", "2/50", "3/50", "50/50"]
    assert "reward  0.500  length     8.2  loss   0.0100" in lines[0]
    assert "(rollout 0.20 train 0.50)" in lines[0]
    assert "eta" in lines[0]
    assert "eta" not in lines[-1]


def test_lines_come_at_intervals_and_at_evaluations(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with caplog.at_level("INFO"), TerminalProgress(100, None, every=10) as progress:
        now[0] += 60.0  # an engine that takes long to start
        progress.begin()
        for step in range(1, 31):
            now[0] += 2.0
            progress.step(METRICS | ({"eval/accuracy": 0.75} if step == 7 else {}))
    steps = [int(r.getMessage()[5:8]) for r in caplog.records]
    assert steps == [1, 2, 3, 7, 12, 17, 22, 27]
    assert "  2.00 s (" in caplog.records[0].getMessage()
    assert "eval  75.0%" in caplog.records[3].getMessage()
    assert len({r.getMessage().index("length") for r in caplog.records}) == 1
    assert progress.estimate_remaining() == 140.0


def test_graded_rewards_are_shown_as_their_mean_and_columns_keep_their_places(caplog):
    values = [{}, {"eval/accuracy": 0.0, "eval/reward": 0.56}, {"eval/accuracy": 0.5, "eval/reward": 0.5}]
    with caplog.at_level("INFO"), TerminalProgress(100, None) as progress:
        for step, more in enumerate(values, 8):
            progress.step(
                METRICS | {"train/grad_norm": 10.0**step, "rollout/length_mean": 10.0**step / 1e6} | more, done=step
            )
    lines = [r.getMessage() for r in caplog.records]
    assert "eval reward  0.560" in lines[0] and "%" not in lines[0]
    assert "eval  50.0%" in lines[1] and "eval reward" not in lines[1]
    assert len({line.index("grad") for line in lines}) == 1


def test_several_policies_have_a_loss_each(caplog):
    with caplog.at_level("INFO"), TerminalProgress(2, None) as progress:
        progress.step({"reward/mean": 0.5, "one/train/loss": 0.01, "two/train/loss": -0.02, "one/train/grad_norm": 3.0})
        progress.step({"train/loss": 0.01, "critic/train/loss": 0.5})
    several, with_critic = [r.getMessage() for r in caplog.records]
    assert "reward  0.500  loss one   0.0100  loss two  -0.0200  grad one       3" in several
    assert "loss   0.0100" in with_critic and "critic" not in with_critic


def test_a_long_phase_logs_its_progress(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False)
    with caplog.at_level("INFO"), TerminalProgress(5, console, every=10.0) as progress:
        progress.phase("warm start", total=100)
        for _ in range(100):
            now[0] += 0.25
            progress.advance()
    assert [r.getMessage() for r in caplog.records] == [
        "step 1: warm start 40 of 100  eta 0:15",
        "step 1: warm start 80 of 100  eta 0:05",
    ]


def test_resumed_run_counts_from_its_step(caplog):
    lines = plain_run(caplog, 12, start=10)
    assert [line.split()[1] for line in lines] == ["11/12", "12/12"]


def test_on_a_terminal_bars_show_step_reward_and_phase():
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    with TerminalProgress(3, console) as progress:
        progress.phase("rollout", total=8)
        progress.advance(5)
        progress._bars.refresh()
        middle = console.file.getvalue()
        progress.step(METRICS)
    text = console.file.getvalue()
    assert "rollout" in middle
    assert "5/8" in middle
    assert "1/3" in text
    assert "reward 0.500" in text
    assert "eta" in text


def test_a_quiet_console_is_told_nothing(capfd, tmp_path):
    import logging

    try:
        logs.configure("info", tmp_path, Console(quiet=True))
        logging.getLogger("miles_core.loop").info("told")
        assert capfd.readouterr() == ("", "")
        assert "told" in (tmp_path / "run.log").read_text()
    finally:
        for handler in [h for h in logging.getLogger().handlers if h.get_name() == "miles"]:
            logging.getLogger().removeHandler(handler)


def test_log_level_and_run_log(tmp_path, monkeypatch):
    import logging

    monkeypatch.delenv("MILES_DEBUG", raising=False)
    out = io.StringIO()
    logs.configure("warning", tmp_path, Console(file=out, force_terminal=False), loggers=["miles_mine"])
    try:
        logging.getLogger("miles_core.loop").info("quiet")
        logging.getLogger("miles_mine.hooks").warning("loud")
        logging.getLogger("otherlib").info("chatter")
        assert "quiet" not in out.getvalue()
        assert "loud" in out.getvalue()
        text = (tmp_path / "run.log").read_text()
        assert "quiet" in text
        assert "miles_mine.hooks: loud" in text
        assert "chatter" not in text
        monkeypatch.setenv("MILES_DEBUG", "1")
        logs.configure("warning", None, Console(file=out, force_terminal=False))
        logging.getLogger("miles_core.loop").debug("details")
        assert out.getvalue().count("details") == 1
    finally:
        for handler in [h for h in logging.getLogger().handlers if h.get_name() == "miles"]:
            logging.getLogger().removeHandler(handler)


def test_wrong_log_level():
    import pytest

    from miles_core.errors import ConfigError

    with pytest.raises(ConfigError, match="--log-level loud: choose one of debug, info, warning, error"):
        logs.configure("loud")


def test_a_long_phase_says_how_long_it_will_take(caplog, monkeypatch):
    """As the demo's warm start on a slow machine, before any step has ended."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with caplog.at_level("INFO"), TerminalProgress(100, None, every=10) as progress:
        progress.phase("warm start", total=80)
        for _ in range(20):
            now[0] += 3.0
            progress.advance()
    lines = [r.getMessage() for r in caplog.records]
    assert lines[0] == "step 1: warm start 4 of 80  eta 3:48" and lines[-1].endswith("20 of 80  eta 3:00")


def test_a_short_phase_on_a_terminal_has_no_estimate(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with TerminalProgress(10, Console(file=io.StringIO(), force_terminal=True)) as progress:
        progress.phase("rollout", total=4)
        now[0] += 0.5
        progress.advance(1)
        assert progress._bars.tasks[1].fields["text"] == ""
        now[0] += 3.0
        progress.advance(1)
        assert progress._bars.tasks[1].fields["text"] == "eta 0:04"
