import base64
import hashlib
import json
import re
import time

import pytest

from miles_core.errors import MilesError
from miles_core.observe import environment
from miles_core.plugin.panel import Panel
from miles_tools.commands.report import run as command
from miles_tools.report.plots import PALETTE, draw, open_image, panels, plot, smooth
from miles_tools.report.reading import BUDGET_FILE
from miles_tools.report.report import report

STEP = {
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "rollout/length_mean": 4.0,
    "train/loss": -0.01,
    "train/kept_for_later": 3.0,
    "train/approx_kl_k3": 0.0,
    "mismatch/kl_k3": 1e-6,
    "mine/things": 7.0,
    "time/rollout": 0.2,
    "time/train": 0.5,
    "time/step": 0.7,
}


def make_run(directory, steps, age=0.0, **more):
    now = time.time() - age
    metrics = {"reward/mean": 0.5} | more
    records = [{"step": s, "time": now + s - steps, **metrics} for s in range(1, steps + 1)]
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (directory / "config.yaml").write_text(
        "run: {plugins: [mine]}\nrollout: {num_rollout: 5}\ndefaults:\n  rollout: {temperature: 1.0}\n"
    )
    (directory / "plan.json").write_text(
        json.dumps(
            {
                "digest": "8f3c12ab",
                "core": "0.1.0",
                "plugins": [
                    {"name": "mine", "version": "0.3", "source": "miles-plugin-mine 0.3", "because": "--plugins mine"}
                ],
            }
        )
    )
    return directory


def data_of(page):
    """The data in a report."""
    return json.loads(re.search('id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def overview_of(page):
    return data_of(page)["overview"]


def first_run(page):
    return overview_of(page)["runs"][0]


def text_of(page):
    """All that a report says about its first run, as one text."""
    return json.dumps(first_run(page), ensure_ascii=False)


def plots_of(page):
    return {section["title"]: [plot["title"] for plot in section["plots"]] for section in overview_of(page)["sections"]}


def test_report_is_one_file_with_every_panel_and_pngs(tmp_path):
    run_dir = make_run(tmp_path / "run", 5, **STEP)
    page = report(run_dir)
    text = page.read_text()
    assert not re.search(r'(?:src|href)="(?!data:|#)', text) and "{{" not in text
    pngs = {p.name for p in (run_dir / "report").iterdir()}
    assert {"reward.png", "length.png", "loss.png", "mismatch.png", "time.png", "mine_things.png"} <= pngs
    assert "kl.png" not in pngs  # always 0: the table says so
    plots = [plot for section in overview_of(page)["sections"] for plot in section["plots"]]
    assert {f"{plot['name']}.png" for plot in plots} == pngs
    run = first_run(page)
    assert run["status"]["text"] == "Finished: 5 of 5 steps are complete."
    assert run["plan"]["digest"] == "8f3c12ab" and run["plan"]["plugins"][0]["version"] == "0.3"
    assert "Metrics that did not change" in plots_of(page)
    assert ["rollout.num_rollout", "5"] in run["changed"] and "temperature" not in json.dumps(run["changed"])
    assert ["train/approx_kl_k3", "0", "0"] in [row[:3] for row in run["rows"]]


def test_the_policy_of_a_report_allows_its_own_scripts_only(tmp_path):
    text = report(make_run(tmp_path / "run", 1)).read_text()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    for tag in ("script", "style"):
        for part in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL):
            assert base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in policy


def test_plots_that_do_not_move_are_folded(tmp_path):
    names = ("reward/mean", "rollout/length_mean", "train/loss", "train/grad_norm", "train/entropy")
    steady = {"mine/gap": 1e-8, "train/lr": 1e-6, "mine/share": 1.0, "time/rollout": 2.0}
    records = [
        {"step": s, "time": s, **steady, **dict.fromkeys(names, 1.0 + s), "mine/gap": 1e-8 * (s % 3), "mine/up": s}
        for s in range(1, 7)
    ]
    make_run(tmp_path, 1)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = report(tmp_path)
    assert plots_of(page) == {
        "Overview": ["Reward", "Response length", "Policy loss"],
        "Training": ["Gradient norm", "Entropy of the policy", "Time by phase"],
        "Plugin mine": ["up"],
        "Metrics that did not change": ["Learning rate", "gap", "share"],
    }
    assert [section["folded"] for section in overview_of(page)["sections"]] == [False, False, False, True]


def test_graded_rewards_are_reported_as_their_mean(tmp_path):
    page = report(make_run(tmp_path / "graded", 4, **{"eval/accuracy": 0.0, "eval/reward": 0.56}))
    assert "held-out reward" in text_of(page) and "held-out accuracy" not in text_of(page)
    page = report(make_run(tmp_path / "binary", 4, **{"eval/accuracy": 0.5, "eval/reward": 0.5}))
    assert "held-out accuracy" in text_of(page) and "held-out reward" not in text_of(page)


def test_running_and_stopped_runs_are_told_apart(tmp_path):
    assert "Still running: 3 of 5 steps are complete" in text_of(report(make_run(tmp_path / "a", 3)))
    assert "Not running: 3 of 5 steps are complete, the last one 2.8 h ago." in text_of(
        report(make_run(tmp_path / "b", 3, age=10_000))
    )


def test_one_step_no_step_and_only_some_files(tmp_path):
    assert "Still running: 1 of 5" in text_of(report(make_run(tmp_path / "one", 1)))
    page = report(make_run(tmp_path / "none", 0))
    assert "This run has not completed a step yet, so there is nothing to plot." in text_of(page)
    assert not plots_of(page)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "odd": 1.0}\n')
    assert "1 steps are complete" in text_of(report(bare))
    assert {p.name for p in (bare / "report").iterdir()} == {"odd.png"}


def test_a_second_report_replaces_the_plots(tmp_path):
    run_dir = make_run(tmp_path / "run", 2)
    report(run_dir)
    (run_dir / "report" / "stale.png").write_bytes(b"")
    report(run_dir)
    assert not (run_dir / "report" / "stale.png").exists()


def test_values_that_are_not_finite_and_hints(tmp_path):
    run_dir = make_run(tmp_path / "run", 4, **STEP)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time": 0, "train/loss": null, "nonfinite": {"train/loss": "nan"}}\n')
    text = text_of(report(run_dir))
    assert "step 5: train/loss is nan; lower --lr" in text
    assert "1 of 5 values not finite" in text


def test_names_and_values_that_nobody_expects(tmp_path):
    names = [r"mine/a$\frac{$b", "mine/" + "n" * 300, "mine/../../up", "mine/x.y", "mine_x.y", "mine/x:y"]
    run_dir = make_run(tmp_path / "run", 2, **dict.fromkeys(names, 1e308))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "time": None, **dict.fromkeys(names, -1e308)}) + "\n")
    rows = [row[0] for row in first_run(report(run_dir))["rows"]]
    assert all(name in rows for name in names)
    images = {p.name for p in (run_dir / "report").iterdir()}
    assert len(images) == len(names) + 1 and {"mine_x.y.png", "mine_x.y_2.png", "mine_x_y.png"} < images
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/loss": "high"}\n')
    with pytest.raises(MilesError, match=r"line 4 of .* is not a metrics record"):
        report(run_dir)


def test_environment_is_shown(tmp_path):
    run_dir = make_run(tmp_path / "run", 1)
    environment.write_environment(run_dir)
    text = text_of(report(run_dir))
    assert "threads" in text
    assert "torch" in text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("plan.json", "{", "plan.json is not what a run wrote"),
        ("plan.json", "3", "plan.json is not what a run wrote"),
        ("config.yaml", "a: [", "config.yaml is not what a run wrote"),
        ("metrics.jsonl", "x\n", "line 1 of .*metrics.jsonl"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, content, message):
    run_dir = make_run(tmp_path / "run", 1)
    (run_dir / file).write_text(content)
    with pytest.raises(MilesError, match=message):
        report(run_dir)


def test_what_is_no_run_directory(tmp_path):
    with pytest.raises(MilesError, match="no such directory"):
        report(tmp_path / "nowhere")
    with pytest.raises(MilesError, match="is not a run directory"):
        report(tmp_path)


def test_command_prints_the_path(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", 1)
    assert command([str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str((run_dir / "report.html").resolve())


def test_smoothing_ignores_what_is_not_finite():
    values = [1.0] * 90
    values[40] = float("nan")
    assert smooth(values) == [1.0] * 90


def test_images_are_png_and_first_colour_is_used():
    from io import BytesIO

    from matplotlib.image import imread

    records = [{"step": s, "reward/mean": s / 10} for s in range(10)]
    image = imread(BytesIO(draw(panels(records)[0], records)))
    blue = tuple(int(PALETTE[0][i : i + 2], 16) / 255 for i in (1, 3, 5))
    close = abs(image[..., :3] - blue).max(axis=-1) < 0.02
    assert close.sum() > 500
    assert (image[0, 0, :3] == 1).all()


def test_axes_of_tiny_numbers_and_of_rounding():
    records = [{"step": s, "mismatch/kl_k3": 10.0 ** -(8 + s), "some/ratio": 1 + 1e-9 * s} for s in range(8)]
    drawn = []
    for panel in panels(records):
        with open_image(panel.title) as (axes, _):
            plot(axes, panel, records)
        drawn.append(axes)
    mismatch, ratio = drawn
    assert "1e-10" in [label.get_text() for label in mismatch.get_yticklabels()]
    assert ratio.get_ylim() == pytest.approx((0.95, 1.05))


def test_the_mismatch_budget_of_a_verified_run(toy_run):
    run = toy_run(
        ["fp8", "r3"],
        rollout_precision="fp8",
        emulate_precision=True,
        verify_logprobs=True,
        steps=1,
        verify_logprobs_tolerance=5,
    )
    (budget,) = first_run(report(run.directory))["budgets"]
    assert budget["title"] == "Mismatch budget at weight version 0"
    assert "weight quantisation" in [row[0] for row in budget["rows"]]
    assert "replayed: training is free of it" in [row[-1] for row in budget["rows"]]
    assert (run.directory / "report" / "budget.png").is_file()


def test_every_policy_has_its_mismatch_budget(toy_run, tmp_path):
    (tmp_path / "two.yaml").write_text("policies: {solver: {rollout_precision: fp8}, proposer: {}}")
    run = toy_run(
        ["fp8"],
        config=tmp_path / "two.yaml",
        emulate_precision=True,
        verify_logprobs=True,
        steps=1,
        verify_logprobs_tolerance=5,
    )
    solver, proposer = first_run(report(run.directory))["budgets"]
    assert solver["title"] == "Mismatch budget at weight version 0 of solver"
    assert proposer["title"] == "Mismatch budget at weight version 0 of proposer"
    assert "weight quantisation" in [row[0] for row in solver["rows"]]
    assert "weight quantisation" not in [row[0] for row in proposer["rows"]]
    assert {p.name for p in (run.directory / "report").glob("budget*")} == {"budget-solver.png", "budget-proposer.png"}
    file = run.directory / BUDGET_FILE
    file.write_text(json.dumps({"policy": "solver", **json.loads(file.read_text())["solver"]}))  # an earlier version's
    (budget,) = first_run(report(run.directory))["budgets"]
    assert budget["rows"] == solver["rows"]


def test_a_run_that_ended_says_how(tmp_path):
    make_run(tmp_path, 1)
    ending = {"why": "ended by DataError: no such answer", "time": time.time() + 5}
    (tmp_path / "ending.json").write_text(json.dumps(ending))
    page = text_of(report(tmp_path))
    assert "Not running" in page and "It ended by DataError: no such answer." in page


def test_workers_share_a_picture_for_busy_and_one_for_idle():
    records = [{"step": n, "busy/engine-0": 1.0 + n, "idle/engine-0": 0.1 * n, "idle/trainer-0": 0.5} for n in (1, 2)]
    found = {panel.name: list(panel.lines.values()) for panel in panels(records)}
    assert found == {"busy": ["engine-0"], "idle": ["engine-0", "trainer-0"]}


def test_a_plugins_panel_takes_the_metrics_there_are_and_leaves_the_others_alone():
    records = [{"step": n, "some/at_1": 1.0, "some/at_2": 2.0, "some/else": 3.0} for n in (1, 2)]
    declared = [Panel("at", "At", {"some/at_*": "number *", "train/loss": "loss"}), Panel("no", "No", {"other/*": "*"})]
    found = {panel.name: dict(panel.lines) for panel in panels(records, declared)}
    assert found == {"at": {"some/at_1": "number 1", "some/at_2": "number 2"}, "some_else": {"some/else": "else"}}
