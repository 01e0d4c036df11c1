"""Every way a run can end from outside, in every phase of it: is a completed step lost, or a prompt used twice?

In each phase of a run in one process the script sends kill -9, SIGTERM, SIGINT or SIGHUP, fills the disk, or starts a second process that writes
into the same directory. It then continues the run to its end, as the run's last lines advise. An attempt counts as held if the run ended as
specified (exit status, a one-line error, no traceback), left a checkpoint of the last completed step, and finally has the metrics of
an undisturbed run and has trained on every prompt once. Prompts are counted outside the run, in a file that no checkpoint rolls back; for
a repeated step only the last repetition counts, as it does for the weights.

The disk is a small one in memory, in a mount namespace of this script's own (Linux, ``unshare``).
Run: ``python benchmarks/endings.py`` (three minutes on two cores), longer: ``--jobs 16 --attempts 20 --save``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from measure import finish, installed, options

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
FAULTS = ("kill", *SIGNALS, "full disk", "second writer")
PHASES = ("build", "rollout", "train", "sync", "step", "save", "evaluation", "export")
STEPS, GROUPS, SAMPLES = 4, 2, 2
FAULT_STEP = 2  # completed steps when it comes
DISK = 64 << 20
EXIT = {"kill": -9, "SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "full disk": 2, "second writer": 0}
#: Phases in which a run completes in spite of a signal, because it is at its end.
AT_THE_END = ("export",)

PLUGIN = r"""
import json, os, signal, subprocess, sys
from contextlib import suppress
from pathlib import Path
from miles_core.plugin import hookimpl
import miles_embedded.model.export as exporting

HERE = Path(__file__).parent
FAULT, PHASE = json.loads((HERE / "fault.json").read_text())
AT = json.loads((HERE / "steps.json").read_text())

def reached(step, phase):
    if phase != PHASE or step != AT[phase] or (HERE / "met").exists():
        return
    (HERE / "met").touch()
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, FAULT))
    elif FAULT == "full disk":
        with (HERE / "disk" / "filler").open("wb", buffering=0) as file:
            for size in (65536, 1):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass
    else:
        command = json.loads((HERE / "second.json").read_text())
        if (HERE / "disk" / "run" / "checkpoints").is_dir():
            command[command.index("--save")] = "--load"
        done = subprocess.run(command, capture_output=True, text=True)
        (HERE / "second").write_text(json.dumps([done.returncode, done.stderr]))

@hookimpl
def on_model(run, model):
    reached(run.step, "build")

@hookimpl
def on_sample(run, sample):
    reached(run.step, "evaluation" if sample.metadata.get("held_out") else "rollout")

@hookimpl
def on_batch(run, batch):
    prompts = batch.tokens[batch.starts].tolist()
    with (HERE / "trained.jsonl").open("a") as file:
        file.write(json.dumps([run.step, sorted(zip(batch.group.tolist(), prompts))]) + "\n")
    reached(run.step, "train")

@hookimpl
def wrap_weights(run):
    def wrap(inner):
        def weights():
            reached(run.step, "sync")
            yield from inner()
        return weights
    return wrap

@hookimpl
def on_step(run, metrics):
    reached(run.step, "step")

@hookimpl
def on_save(run, policy):
    if policy is not None:
        reached(run.step, "save")

move_into_place = exporting.move_into_place
def move_after_signal(work, final, *rest):
    reached(AT["export"], "export")
    move_into_place(work, final, *rest)
exporting.move_into_place = move_after_signal
"""


def prepare(directory: Path, fault: str, phase: str) -> list[str]:
    """Everything one attempt needs on disk; the arguments of its command."""
    from miles_testing.toy import toy_arguments

    (directory / "disk").mkdir()
    if fault == "full disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", directory / "disk"], check=True)
    letters = [chr(ord("a") + n) for n in range(GROUPS * STEPS)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in letters))
    (directory / "held_out.jsonl").write_text(json.dumps({"input": "z", "metadata": {"held_out": True}}) + "\n")
    (directory / "faults.py").write_text(PLUGIN)
    (directory / "fault.json").write_text(json.dumps([fault, phase]))
    steps = dict.fromkeys(PHASES, FAULT_STEP) | {"build": 0, "export": STEPS}
    (directory / "steps.json").write_text(json.dumps(steps))
    words = toy_arguments(
        [str(directory / "faults.py")],
        directory / "disk" / "run",
        STEPS,
        prompt_data=directory / "prompts.jsonl",
        eval_prompt_data=directory / "held_out.jsonl",
        eval_interval=1,
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
        export_hf=directory / "disk" / "exported",
        # what asks a run to end has to save by itself
        **({} if fault in SIGNALS and phase != "save" else {"save_interval": 1}),
    )
    (directory / "second.json").write_text(json.dumps([sys.executable, "-m", "miles_core", "train", *words]))
    return ["train", *words]


def call(words: list[str], output: Path) -> int:
    """``miles WORDS`` in a process that is forked from this one, which has imported everything; its exit status."""
    number = os.fork()
    if number == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 1
        try:
            from miles_core.cli.main import main

            code = main(words)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def attempt(job: tuple[str, str, int]) -> tuple[str, str, list[str]]:
    """One fault in one phase; what did not hold."""
    fault, phase, _ = job
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        directory = Path(temporary)
        try:
            return fault, phase, _attempt(directory, fault, phase)
        finally:
            if fault == "full disk":
                subprocess.run(["umount", "-l", directory / "disk"], check=False)


def _attempt(directory: Path, fault: str, phase: str) -> list[str]:
    words, run, output = prepare(directory, fault, phase), directory / "disk" / "run", directory / "output"
    wrong = []
    code = call(words, output)
    text = output.read_text(errors="replace")
    if not (directory / "met").exists():
        return [f"the phase was never reached: {text[-500:]}"]
    if fault == "second writer":
        code_of_second, said = json.loads((directory / "second").read_text())
        if code_of_second != 2 or "is writing this run" not in said:
            wrong.append(f"the second writer was told {code_of_second}: {said[-300:]}")
    expected = {EXIT[fault]} | ({0} if phase in AT_THE_END and fault != "kill" else set())
    if code not in expected or "Traceback" in text:
        wrong.append(f"it ended with {code}: {text[-800:]}")
    (directory / "disk" / "filler").unlink(missing_ok=True)
    wrong += _left(run, fault, phase)
    exported = directory / "disk" / "exported" / "config.json"
    if code != 0 or not exported.exists():
        wrong += _continued(words, run, output)
    return wrong + _check_counts(directory, run)


def _left(run: Path, fault: str, phase: str) -> list[str]:
    """A checkpoint of the last completed step is there. A step is complete when it is saved; where the run saves at its end,
    when its metrics are written."""
    from miles_core.checkpoint.directory import Checkpoints

    completed = {"build": 0, "export": STEPS}.get(phase, FAULT_STEP)
    if phase in ("sync", "step", "save", "evaluation") and fault in ("kill", "full disk"):
        completed -= 1  # it was being written down
    if fault == "second writer":
        completed = STEPS
    last = Checkpoints(run / "checkpoints").find_latest() or 0
    return [f"the last checkpoint is of step {last}, {completed} were complete"] if last < completed else []


def _continued(words: list[str], run: Path, output: Path) -> list[str]:
    """Go on as the run's last lines say; without a checkpoint with the same command."""
    exported = run.parent / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    again = list(words)
    if (run / "checkpoints").is_dir():
        place = again.index("--save")
        again[place] = "--load"
    start = output.stat().st_size
    code = call(again, output)
    if code:
        return [f"going on ended with {code}: {output.read_text(errors='replace')[start:][-800:]}"]
    return [] if (exported / "config.json").exists() else ["nothing was exported"]


def _numbers(run: Path) -> dict[int, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: [r.get(k) for k in ("reward/mean", "train/loss", "train/grad_norm")] for r in lines if r["step"]}


def _check_counts(directory: Path, run: Path) -> list[str]:
    """Check that every prompt was used once and that the numbers equal those of an undisturbed run. Returns the differences."""
    counted = dict(json.loads(line) for line in (directory / "trained.jsonl").read_text().splitlines())
    uses = Counter(tuple(pair) for pairs in counted.values() for pair in pairs)
    wrong = []
    if len(counted) != STEPS or len(uses) != GROUPS * STEPS or set(uses.values()) != {SAMPLES}:
        wrong.append(f"prompts were used {sorted(uses.values())} times over {len(counted)} steps")
    reference = json.loads(os.environ["MILES_ENDINGS_REFERENCE"]) if "MILES_ENDINGS_REFERENCE" in os.environ else None
    if reference is not None and {str(k): v for k, v in _numbers(run).items()} != reference:
        wrong.append(f"other numbers than without: {_numbers(run)}, {reference}")
    return wrong


def reference() -> dict[int, Any]:
    """Return the metrics of an undisturbed run."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        words = prepare(directory, "none", "none")
        code = call(words, directory / "output")
        if code:
            raise SystemExit((directory / "output").read_text())
        return _numbers(directory / "disk" / "run")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--attempts", type=int, default=1, help="of each fault in each phase")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--phases", default=",".join(PHASES))
    chosen = parser.parse_args()
    if "MILES_ENDINGS_INSIDE" not in os.environ:  # a mount namespace of its own, gone with this process
        os.environ |= {"MILES_ENDINGS_INSIDE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.execvp("unshare", ["unshare", "-Urm", sys.executable, *sys.argv])
    import miles_core.launch  # noqa: F401  # once, before the forks
    import miles_embedded.engine.engine
    import miles_embedded.trainer.trainer  # noqa: F401
    from miles_testing.toy import toy_files

    toy_files()
    os.environ["MILES_ENDINGS_REFERENCE"] = json.dumps(reference())
    faults, phases = chosen.faults.split(","), chosen.phases.split(",")
    jobs = [(fault, phase, n) for n in range(chosen.attempts) for fault in faults for phase in phases]
    cells = {f"{fault}, {phase}": {"attempts": 0, "held": 0, "failed": 0} for fault in faults for phase in phases}
    lost = twice = 0
    with multiprocessing.get_context("fork").Pool(chosen.jobs, maxtasksperchild=1) as pool:
        for fault, phase, wrong in pool.imap_unordered(attempt, jobs):
            found = cells[f"{fault}, {phase}"]
            found["attempts"] += 1
            found["failed" if wrong else "held"] += 1
            lost += any("the last checkpoint is of" in text for text in wrong)
            twice += any("prompts were used" in text for text in wrong)
            for text in wrong:
                print(f"{fault}, {phase}: {text}", file=sys.stderr, flush=True)
    total = {name: sum(found[name] for found in cells.values()) for name in ("attempts", "held", "failed")}
    result = {"steps": STEPS, "cells": cells, **total, "completed_steps_lost": lost, "prompts_used_twice": twice}
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch", "transformers"))
    sys.exit(1 if total["failed"] else 0)


if __name__ == "__main__":
    main()
