"""``miles launch``: bash runs the scripts, with commands that record how they are called."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from miles_core.cli.plan import run as plan
from miles_core.plugin import ConfigError, PlanError
from miles_planner.launch.command import paths_outside, run
from miles_planner.launch.job import Job

ROOT = Path(__file__).parents[3]
RUN = [
    "--runtime",
    "ray",
    "--engine",
    "sglang",
    "--trainer",
    "megatron",
    "--colocate",
    "--rollout-num-gpus-per-engine",
    "8",
]
RUN += ["--tensor-model-parallel-size", "4", "--sequence-parallel", "--expert-model-parallel-size", "2"]
RUN += ["--recompute-granularity", "full", "--optimizer-cpu-offload", "--sglang-mem-fraction-static", "0.6"]
RUN += ["--actor-num-gpus-per-node", "8", "--prompt-data", "a b.jsonl"]


@pytest.fixture
def launch(checkpoint, tmp_path, capsys):
    def write(kind, *argv, machines=2):
        out = tmp_path / "file"
        words = [
            kind,
            "--hardware",
            f"{machines}x8xH100",
            "--out",
            str(out),
            "--hf-checkpoint",
            checkpoint("qwen3-30b-a3b"),
        ]
        assert run([*words, *RUN, "--actor-num-nodes", str(machines), *argv]) == 0
        return out, capsys.readouterr().out

    return write


def check_shell(text):
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def simulate(text, tmp_path, machines, **environment):
    """Run a script with commands that only record how they are called, and return the lines of the record."""
    done, record = execute(text, tmp_path, machines, **environment)
    assert done.returncode == 0, done.stderr
    return record.read_text(encoding="utf-8").splitlines()


def execute(text, tmp_path, machines, **environment):
    """Run a script with recorded commands; returns the finished process and the file of the record."""
    record, environment = record_commands(tmp_path, machines, **environment)
    done = subprocess.run(
        ["bash", "-c", text], env=environment, text=True, capture_output=True, check=False, timeout=30
    )
    return done, record


def record_commands(tmp_path, machines, **environment):
    """Make commands that only record how they are called; returns the file of the record and the environment of a script."""
    record, folder = tmp_path / "record", tmp_path / "bin"
    folder.mkdir()
    bodies = {
        "scontrol": "\n".join(f"echo node{n}" for n in range(machines)),
        "srun": f'printf "%s\\n" "srun $*" >> {record}\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"',
        # a machine that starts before the first one tries again
        "ray": f'printf "%s\\n" "ray $*" >> {record}\n[[ " $* " == *" --head "* ]] || grep -q -- --head {record}',
        "python3": f'printf "%s\\n" "python3" >> {record}',
        "miles": f'printf "%s\\n" "miles $* RAY_ADDRESS=$RAY_ADDRESS" >> {record}',
        "sleep": "exec /bin/sleep 0.2",
    }
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    job = {"SLURM_CPUS_ON_NODE": "96", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"node[0-{machines - 1}]"}
    return record, {"PATH": f"{folder}:/usr/bin:/bin", **job, **environment}


def test_the_slurm_script_starts_ray_on_every_machine_and_the_driver_once(launch, tmp_path):
    path, said = launch("slurm", "--shared", str(tmp_path), "--hours", "3", machines=4)
    text = path.read_text(encoding="utf-8")
    check_shell(text)
    assert {"#SBATCH --nodes=4", "#SBATCH --gpus-per-node=8", "#SBATCH --time=3:00:00"} <= set(text.splitlines())
    assert f"start it with: sbatch {path}" in said
    lines = simulate(text, tmp_path, 4, SLURM_JOB_NODELIST="node[0-3]")
    assert sum(line.startswith("ray start --head") for line in lines) == 1
    joining = [line for line in lines if line.startswith("ray start --address=node0:6379")]
    assert len(joining) >= 3 and all(line.endswith("--num-gpus=8 --disable-usage-stats --block") for line in joining)
    assert sum("--nodelist=node0" in line for line in lines) == 1, "Ray's head and the driver are in one container"
    driver = [line for line in lines if line.startswith("miles train")]
    assert len(driver) == 1 and driver[0].endswith("RAY_ADDRESS=node0:6379") and "--prompt-data a b.jsonl" in driver[0]
    assert lines.index("python3") < lines.index(driver[0]), "the driver starts when all machines have joined"
    steps = [line for line in lines if line.startswith("srun")]
    assert all("--cpus-per-task=96 --cpu-bind=none" in line for line in steps), "Ray counts the processors of its step"
    assert "#SBATCH --mem=0" in text, "an optimizer in host memory needs all of it"


def test_the_slurm_script_stops_the_driver_before_the_time_limit_and_returns_its_status(launch, tmp_path):
    path, _ = launch("slurm", "--shared", str(tmp_path), "--stop-within", "90.5")
    text = path.read_text(encoding="utf-8")
    assert "#SBATCH --signal=B:TERM@121" in text.splitlines()
    record, environment = record_commands(tmp_path, 2)
    (tmp_path / "bin" / "miles").write_text(
        f"#!/bin/bash\ntrap 'echo saved >> {record}; exit 42' TERM\necho runs >> {record}\nwhile :; do /bin/sleep 0.05; done\n"
    )
    script = subprocess.Popen(["bash", "-c", text], env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 30
    while "runs" not in (record.read_text(encoding="utf-8") if record.exists() else "") and time.monotonic() < end:
        time.sleep(0.05)
    script.terminate()
    _, said = script.communicate(timeout=30)
    assert (script.returncode, said) == (42, "")
    lines = record.read_text(encoding="utf-8").splitlines()
    # a machine that joins writes lines at any time
    assert [line for line in lines if line in ("runs", "saved")] == ["runs", "saved"]
    assert not list(tmp_path.glob(".miles-*"))


def test_a_run_without_a_directory_gets_one_below_the_shared_one(launch):
    path, said = launch("slurm", "--name", "first")
    assert "added --save /shared/first: the run's directory must be one that all machines share" in said
    assert "--save /shared/first &\n" in path.read_text(encoding="utf-8")
    path, said = launch("slurm", "--save", "/data/runs/1")
    assert "added" not in said and path.read_text(encoding="utf-8").count("--save") == 1


def test_a_file_that_cannot_be_written_is_named(checkpoint):
    with pytest.raises(ConfigError, match=r"--out /proc/x/y: the file cannot be written"):
        run(["slurm", "--hardware", "2x8xH100", "--out", "/proc/x/y", "--hf-checkpoint", checkpoint("qwen3-30b-a3b"), *RUN,
             "--actor-num-nodes", "2"])  # fmt: skip


def test_gpus_that_the_run_leaves_idle_are_reported(checkpoint, capsys):
    argv = ["--hf-checkpoint", checkpoint("qwen3-30b-a3b"), *RUN, "--actor-num-nodes", "2"]
    assert plan(["--hardware", "4x8xH100", *argv]) == 0
    assert "the run uses 16 of 32 GPUs" in capsys.readouterr().out
    assert plan(["--hardware", "2x8xH100", *argv]) == 0
    assert "the run uses" not in capsys.readouterr().out


def test_a_shared_directory_that_any_machine_lacks_stops_the_slurm_script(launch, tmp_path):
    path, _ = launch("slurm", "--shared", "/no/such/directory")
    done, record = execute(path.read_text(encoding="utf-8"), tmp_path, 2, SLURM_JOB_NODELIST="node[0-1]")
    assert done.returncode == 1 and "/no/such/directory is not mounted on" in done.stderr
    (check,) = record.read_text(encoding="utf-8").splitlines()
    assert check.startswith("srun ") and "--ntasks-per-node=1" in check and "--nodes" not in check, "on every machine"


def test_paths_outside_the_shared_directory_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    words = [
        "--save",
        "/shared/runs/a",
        "--prompt-data",
        "data/a.jsonl",
        "--custom-rm-path",
        "data/a.jsonl:rm",
        "--hf-checkpoint=/models/x",
    ]
    assert paths_outside([*words, "--sglang-model", "Qwen/Qwen3"], "/shared") == ["data/a.jsonl", "/models/x"]
    assert paths_outside(words, "/") == []


def test_a_container_is_used_if_an_image_is_given(launch):
    path, said = launch("slurm", "--image", "registry/miles:1")
    text = path.read_text(encoding="utf-8")
    check_shell(text)
    assert "not below --shared /shared, which is all that the container sees: /" in said
    assert "container=(--container-image=registry/miles:1 --container-mounts=/shared:/shared)" in text


def test_a_run_that_the_plan_refuses_is_not_launched(launch, tmp_path):
    with pytest.raises(PlanError, match="divide"):
        launch("slurm", "--pipeline-model-parallel-size", "7")
    assert not (tmp_path / "file").exists()


def test_a_command_with_a_credential_is_not_written(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "Q7zSecretOfThisTest99")
    with pytest.raises(ConfigError, match="looks like a credential, and the file would keep it"):
        launch("slurm", "--use-wandb", "--wandb-group", "Q7zSecretOfThisTest99")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "My_Run"}, "--name My_Run: use at most 47 lower-case"),
        ({"shared": "data"}, "--shared data: give an absolute path"),
        ({"hours": 0}, "--hours 0: a job needs at least one hour"),
    ],
)
def test_impossible_jobs_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Job(**{"name": "a", "machines": 1, "gpus": 8, "gpu": "H100", "command": ("miles",), "header": "", **fields})


def test_several_machines_need_a_runtime_for_them(checkpoint):
    with pytest.raises(ConfigError, match="a run on 2 machines needs a runtime with several processes"):
        run(
            [
                "slurm",
                "--hardware",
                "2x8xH100",
                "--hf-checkpoint",
                checkpoint("qwen3-0.6b"),
                "--max-running-requests",
                "8",
            ]
        )


def test_a_search_writes_the_launch_file_of_its_best_layout(checkpoint, tmp_path, capsys):
    out = tmp_path / "best.sbatch"
    argv = ["--hf-checkpoint", checkpoint("qwen3-30b-a3b"), "--hardware", "2x8xH200", "--top", "1", "--json"]
    assert plan(["--search", *argv, "--launch", "slurm", "--out", str(out)]) == 0
    said = capsys.readouterr()
    text = out.read_text(encoding="utf-8")
    check_shell(text)
    assert "start it with: sbatch" in said.err
    flags = re.search(r"miles train .*", text)
    assert flags and "--runtime ray" in flags[0] and "--actor-num-gpus-per-node" in flags[0]
