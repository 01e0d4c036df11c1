"""Rollouts in workers: the samples and checkpoints of one process, whatever happens to the workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import traceback
from pathlib import Path

import pytest

from miles_core.data import prompt_index
from miles_core.data import prompts as core_prompts
from miles_core.data.prompts import Prompts
from miles_core.errors import ConfigError, DataError, PlanError, WorkerLost
from miles_testing.doubles import remote
from miles_tools.samples.files import read_rollouts
from miles_workers import prompt_rows, remote_sample
from miles_workers.remote_tokens import StoredTokens
from miles_workers.rollout_worker import share_limit

STEPS = 3

#: Kills workers (number of the sample, name) once each, in a hook that runs in a rollout worker.
FAULTS = """
import json
from miles_core.plugin import hookimpl
from miles_testing.doubles import remote

@hookimpl
def on_sample(run, sample):
    with (run.directory.parent / "seen.jsonl").open("a") as file:
        file.write(json.dumps([sample.index, run.step]) + "\\n")
    path = run.directory.parent / "faults.json"
    waiting = json.loads(path.read_text())
    for fault in [f for f in waiting if f[0] == sample.index]:
        waiting.remove(fault)
        path.write_text(json.dumps(waiting))
        (remote.latest().hang if fault[1].startswith("-") else remote.latest().kill)(fault[1].lstrip("-"))
"""


@pytest.fixture(scope="module")
def alone():
    """The run in one process."""
    from miles_testing import toy_run

    return toy_run(steps=STEPS, save_interval=1, eval_interval=2, eval_prompt_data=prompts())


def prompts():
    from miles_testing.toy import toy_files

    return toy_files() / "prompts.jsonl"


@pytest.fixture
def run_remote(toy_run, tmp_path):
    """``run_remote(workers, faults, **options)``: the same run with rollout workers, of which some are killed."""
    (tmp_path / "faults.py").write_text(FAULTS)

    def call(workers, faults=(), **options):
        (tmp_path / "faults.json").write_text(json.dumps(faults))
        given = {"steps": STEPS, "save_interval": 1, "eval_interval": 2, "eval_prompt_data": prompts(), **options}
        done = toy_run(
            [remote.__file__, str(tmp_path / "faults.py")],
            directory=tmp_path / "run",
            runtime="remote",
            rollout_workers=workers,
            **given,
        )
        assert not json.loads((tmp_path / "faults.json").read_text()), "a fault was never reached"
        return done

    return call


def checkpoints(done):
    """Every file of the checkpoints except the manifests, which hold the configuration."""
    files = (done.directory / "checkpoints").rglob("*")
    return {
        str(f.relative_to(done.directory)): f.read_bytes() for f in files if f.is_file() and f.name != "manifest.json"
    }


def rows(done):
    """The samples of all steps in order. Log-probs depend on the requests that an engine computes together, in their last bits."""
    return [{key: value for key, value in sample.items() if "log_probs" not in key} for sample in done.samples]


def evaluations(done):
    return [(m["step"], m["eval/reward"]) for m in done.metrics if "eval/reward" in m]


def check_equal(done, alone):
    assert rows(done) == rows(alone)
    assert checkpoints(done) == checkpoints(alone) and checkpoints(alone)
    assert evaluations(done) == evaluations(alone) and len(evaluations(alone)) > 1


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_order_and_checkpoints_are_those_of_one_process(run_remote, alone, workers):
    done = run_remote(workers)
    check_equal(done, alone)
    for number in range(workers):
        assert all(f"busy/rollout-{number}" in m for m in done.metrics if m["step"])
    assert remote.latest().restarts.used == 0


def test_groups_of_a_killed_worker_are_generated_again(run_remote, alone, tmp_path):
    done = run_remote(2, [(1, "rollout-0"), (1, "rollout-1"), (9, "rollout-1")])
    check_equal(done, alone)
    assert remote.latest().restarts.used == 3
    log = (done.directory / "run.log").read_text()
    assert "worker rollout-1 was lost: it was killed; it is replaced (3 of 3 times)" in log


def test_a_worker_that_hangs_is_replaced(run_remote, alone):
    check_equal(run_remote(2, [(9, "-rollout-0"), (9, "-rollout-1")], worker_heartbeat=0.5), alone)
    assert remote.latest().restarts.used == 2


@pytest.fixture
def reads(monkeypatch):
    """What this process reads of samples and of recorded values, each as (file, function) of the callers. In the real runtimes, ranks read
    in another process."""
    found = []

    def record(plain):
        def read(*args):
            frames = [(Path(frame.filename).name, frame.name) for frame in traceback.extract_stack()]
            if not any(file == "learner.py" for file, _ in frames):  # no rank
                found.append(frames)
            return plain(*args)

        return read

    monkeypatch.setattr(remote_sample, "read_samples", record(remote_sample.read_samples))
    monkeypatch.setattr(StoredTokens, "values", record(StoredTokens.values))
    return found


def test_the_driver_receives_no_tokens(run_remote, alone, reads, monkeypatch):
    """Requests go from the workers to the engines, and samples from the workers to the ranks and to the process that saves them."""
    sent = []
    plain = remote.DoubleWorkers.send

    async def send(self, number, method, *args):
        sent.append((self.names[number].partition("-")[0], method, *args[:1] * (method == "post")))
        return await plain(self, number, method, *args)

    monkeypatch.setattr(remote.DoubleWorkers, "send", send)
    done = run_remote(2)
    clients = {call[2].partition("-")[0] for call in sent if call[:2] == ("engine", "post")}
    assert clients == {"rollout"}
    assert [frames for frames in reads if not any(name == "rollout_worker.py" for name, _ in frames)] == []
    assert rows(done) == rows(alone)
    assert all(row["train_log_probs"] is not None and row["pieces"] for row in done.samples)
    for one, other in zip(done.samples, alone.samples, strict=True):
        for name in ("rollout_log_probs", "train_log_probs"):
            assert one[name] == pytest.approx(other[name], abs=1e-4)
    held_out, expected = (list(read_rollouts(each.directory, "eval")) for each in (done, alone))
    assert [(s["step"], s["tokens"], s["pieces"]) for s in held_out] == [
        (s["step"], s["tokens"], s["pieces"]) for s in expected
    ]
    assert expected


@pytest.fixture
def rows_read(monkeypatch):
    """For each row of a prompt file that was read during training, whether a rollout worker read it."""
    found, plain = [], Prompts.row

    def read(self, at):
        frames = [(Path(frame.filename).name, frame.name) for frame in traceback.extract_stack()]
        if not {"examine", "_groups"} & {name for _, name in frames}:  # checks before the run, and evaluations
            found.append(("rollout_worker.py", "_pending") in frames)
        return plain(self, at)

    monkeypatch.setattr(Prompts, "row", read)
    return found


def test_workers_read_the_prompts(run_remote, alone, rows_read):
    check_equal(run_remote(2, [(9, "rollout-1")]), alone)
    assert rows_read and all(rows_read)


def test_a_worker_without_the_prompt_files_receives_prompts(run_remote, alone, rows_read, monkeypatch):
    def fail(*_):
        raise DataError("there is no prompt file here")

    monkeypatch.setattr(prompt_rows, "open_prompts", fail)
    done = run_remote(2)
    check_equal(done, alone)
    assert rows_read and not any(rows_read)
    log = (done.directory / "run.log").read_text()
    for name in ("rollout-0", "rollout-1"):
        line = f"worker {name} does not read prompts itself, so the driver sends them: there is no prompt file here"
        assert log.count(line) == 1


def test_a_worker_with_other_rows_receives_prompts(run_remote, alone, rows_read, monkeypatch, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"input": "h"}\n')
    monkeypatch.setattr(prompt_rows, "open_prompts", lambda *_: Prompts(str(other)))
    done = run_remote(1)
    check_equal(done, alone)
    assert rows_read and not any(rows_read)
    assert "its prompt files have other rows than the driver's" in (done.directory / "run.log").read_text()


def test_large_prompt_files_are_read_by_workers(run_remote, toy_run, rows_read, monkeypatch, tmp_path):
    """Rows that are too long are left out by the driver, which renders them."""
    for module in (prompt_index, core_prompts):
        monkeypatch.setattr(module, "ROWS", 4)
    monkeypatch.setattr(prompt_index, "SAMPLE", 3)
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "large.jsonl"
    path.write_text(
        "".join(json.dumps({"input": "ab" * (1 + 9 * (n % 3 == 1)), "label": "a"}) + "\n" for n in range(9))
    )
    options = {"prompt_data": path, "rollout_max_prompt_len": 6, "rollout_shuffle": True, "eval_prompt_data": None}
    options["eval_interval"] = None
    alone = toy_run(steps=STEPS, save_interval=1, **options)
    rows_read.clear()
    done = run_remote(2, **options)
    assert rows(done) == rows(alone) and checkpoints(done) == checkpoints(alone)
    assert sum(rows_read) == STEPS * 2 < len(rows_read)


def test_a_filter_that_reads_tokens_in_the_driver_is_noticed(run_remote, alone, reads, tmp_path):
    """The control of the test above; the samples are saved all the same."""
    (tmp_path / "filter.py").write_text("def keep(args, group):\n    return bool(group[0].tokens)\n")
    done = run_remote(2, dynamic_sampling_filter_path=tmp_path / "filter.py")
    assert any(("filter.py", "keep") in frames for frames in reads)
    assert rows(done) == rows(alone)


def test_engines_are_replaced_while_workers_use_them(run_remote, alone):
    faults = [(1, "engine-1"), (9, "engine-0"), (10, "rollout-1"), (17, "-engine-1")]
    done = run_remote(2, faults, remote_engines=2, max_restarts=5, worker_heartbeat=0.5)
    check_equal(done, alone)
    assert remote.latest().restarts.used == 4
    assert all(f"busy/engine-{number}" in m for m in done.metrics if m["step"] for number in range(2))


def test_an_engine_that_cannot_be_replaced_ends_the_run(run_remote):
    with pytest.raises(WorkerLost, match=r"engine-0 was lost: it was killed.*--max-restarts 0"):
        run_remote(2, [(1, "engine-0")], max_restarts=0)


def test_an_engine_and_a_rank_are_replaced_while_workers_wait(run_remote, alone):
    done = run_remote(2, [(9, "engine-0"), (17, "trainer-0")])
    assert rows(done) == rows(alone) and checkpoints(done) == checkpoints(alone)
    assert remote.latest().restarts.used == 2


def test_too_many_losses_end_the_run_with_the_last_one(run_remote):
    with pytest.raises(
        WorkerLost,
        match=r"worker rollout-0 was lost: it was killed, and no worker may be replaced \(--max-restarts 0\)",
    ):
        run_remote(1, [(1, "rollout-0")], max_restarts=0)


@pytest.mark.parametrize("schedule", ["sync", "ahead", "async"])
def test_dropped_groups_are_generated_later(run_remote, tmp_path, schedule):
    """More prompts are requested than a step needs, and a filter drops some: workers abort groups, whose prompts return."""
    (tmp_path / "keep.py").write_text("def keep(args, group):\n    return group[0].group_index % 3 != 1\n")
    more = {} if schedule == "async" else {"over_sampling_batch_size": 4}
    done = run_remote(
        2,
        schedule=schedule,
        dynamic_sampling_filter_path=tmp_path / "keep.py",
        eval_interval=None,
        eval_prompt_data=None,
        **more,
    )
    groups = [sample["index"] // 4 for sample in done.samples]
    assert len(groups) == STEPS * 8 and all(number % 3 != 1 for number in groups)
    assert len({*groups}) == STEPS * 2


def test_a_run_is_resumed_with_another_number_of_workers(run_remote, toy_run, alone, tmp_path):
    run_remote(2, steps=1)
    saved = tmp_path / "run" / "checkpoints" / "step_00000001"
    elsewhere = shutil.copytree(saved, tmp_path / saved.name)  # not in the run directory, whose options would be used
    again = toy_run(directory=tmp_path / "again", load=elsewhere, steps=STEPS, save_interval=1)
    assert rows(again) == [row for row in rows(alone) if row["step"] > 1]
    with_workers = run_remote(2, load=tmp_path / "run")
    assert rows(with_workers) == rows(alone), "the samples of the first step are those of the first run"
    last = f"checkpoints/step_0000000{STEPS}/"
    assert {n: f for n, f in checkpoints(again).items() if n.startswith(last)} == {
        n: f for n, f in checkpoints(alone).items() if n.startswith(last)
    }


def test_limits_are_shared():
    assert [share_limit(7, n, 3) for n in range(3)] == [3, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_workers": 0}, "--rollout-workers"),
        ({"rollout_workers": 3}, r"rollout.workers must be <= rollout.batch_size.*more would be idle"),
        ({"rollout_workers": 2, "reward_concurrency": 1}, "rollout.workers must be <= reward.concurrency"),
        (
            {"rollout_workers": 2, "max_concurrent_samples": 1},
            "rollout.workers must be <= rollout.max_concurrent_samples",
        ),
    ],
)
def test_numbers_of_workers_that_cannot_be_shared_are_refused(options, message):
    from miles_testing import plan

    with pytest.raises(ConfigError, match=message):
        plan(**options)


def test_a_runtime_without_rollout_workers_is_refused(tmp_path):
    from miles_testing import plan

    (tmp_path / "own.py").write_text(
        "from miles_core.plugin import Plugin\n"
        'plugin = Plugin("own", "a runtime", "0", "~=0.1", provides={"runtime": {"own": "make_runtime"}})\n'
        "def make_runtime(run): ...\n"
    )
    with pytest.raises(PlanError, match=r"(?s)rollout_workers.*it starts the processes"):
        plan([str(tmp_path / "own.py")], runtime="own", rollout_workers=2)


def test_errors_name_the_worker(run_remote, tmp_path):
    (tmp_path / "bad.py").write_text("async def reward(args, sample):\n    return [][sample.index]\n")
    with pytest.raises(
        DataError, match=r"^worker rollout-\d: the reward function reward .*raised IndexError on sample \d+"
    ):
        run_remote(2, custom_rm_path=tmp_path / "bad.py")


def test_results_that_cannot_be_sent_end_the_run(run_remote, tmp_path):
    (tmp_path / "turns.py").write_text(
        "import threading\n"
        "async def generate(args, sample, sampling_params):\n"
        "    response = await args.generate(list(sample.tokens), sampling_params)\n"
        "    sample.tokens = sample.tokens + response.tokens\n"
        "    sample.response_length = len(response.tokens)\n"
        "    sample.metadata['lock'] = threading.Lock()\n"
        "    return sample\n"
    )
    with pytest.raises(DataError, match=r"^worker rollout-\d: sample \d+: metadata\['lock'\] is a lock"):
        run_remote(2, custom_generate_function_path=tmp_path / "turns.py")


LASTING = """
import json, os
from miles_core.plugin import Plugin, RolloutFunction

class Lasting(RolloutFunction):
    def __init__(self, run):
        self.file = run.directory.parent / "calls.jsonl"
    def note(self, what):
        with self.file.open("a") as file:
            file.write(json.dumps([what, os.getpid()]) + "\\n")
    async def start(self):
        self.note("start")
    async def stop(self):
        self.note("stop")
    async def __call__(self, sample, ask):
        self.note("call")
        turn = await ask()
        return ask.transcript.samples(sample)

def make(run):
    return Lasting(run)

plugin = Plugin("lasting", "a function with resources", "0", "~=0.1", provides={"generate": {"lasting": "make"}})
"""


@pytest.mark.thorough
def test_local_processes_generate_and_one_is_killed(toy_run, tmp_path, alone, request):
    """Real processes: the functions run there, one is killed with its rollout in progress, and nothing is lost."""
    (tmp_path / "lasting.py").write_text(LASTING)
    killed, over = [], threading.Event()

    def kill_one():
        file = tmp_path / "calls.jsonl"
        while not (file.exists() and sum("call" in line for line in file.read_text().splitlines()) > 8):
            if over.wait(0.01):
                return
        pid = json.loads(file.read_text().splitlines()[-1])[1]
        killed.append(pid)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    request.addfinalizer(over.set)
    done = toy_run(
        [str(tmp_path / "lasting.py")],
        directory=tmp_path / "run",
        steps=STEPS,
        save_interval=1,
        eval_interval=2,
        eval_prompt_data=prompts(),
        generate="lasting",
        rollout_workers=2,
        log_level="info",
    )
    over.set()
    thread.join()
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    pids = {pid for what, pid in calls if what == "call"}
    assert len(pids) >= 2 and os.getpid() not in pids and killed[0] in pids
    assert pids - {killed[0]} <= {pid for what, pid in calls if what == "stop"}
    tokens = [(s["step"], s["index"], s["tokens"], s["reward"]) for s in done.samples]
    assert tokens == [(s["step"], s["index"], s["tokens"], s["reward"]) for s in alone.samples]
    log = (done.directory / "run.log").read_text()
    assert re.search(r"worker rollout-\d was lost: its process was killed by signal 9 \(SIGKILL\)", log)
    assert "it is replaced (1 of 3 times)" in log
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
