"""``miles watch`` on a long run: seconds until the page shows its plots and its samples, and the memory of page and server.

The run has 1,000 steps of 512 samples with 200 tokens, and 60 metrics. Its files of samples are one file under 1,000 names: each is read
like any other, and the disk need not hold a gigabyte. ``miles watch`` runs in its own process. Each turn opens the page in a new
headless Chromium (Debian's ``chromium`` and ``chromium-driver``): first the overview, then the samples of a step that nothing has read
before; then it looks at 20 steps. Without Chromium, the answers of the server are measured alone.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.measure import ROOT, finish, installed, options
from miles_tools.samples.files import FILE
from tests.browser import MISSING, open_browser

STEPS, SAMPLES, TOKENS, METRICS = 1000, 512, 200, 60
#: Steps whose samples are shown one after the other before memory is measured.
VISITED = 20


def make_run(directory: Path, steps: int) -> None:
    """Write a run directory with random numbers in place of a model."""
    randoms = random.Random(1)
    names = ["reward/mean", "reward/std", "rollout/length_mean", "train/loss", "train/grad_norm", "mismatch/kl_k3"]
    names += [f"time/phase_{i}" for i in range(8)] + [f"mine/metric_{i}" for i in range(METRICS - len(names) - 8)]
    records = ({"step": s, "time": s, **{name: randoms.random() for name in names}} for s in range(1, steps + 1))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "config.yaml").write_text(f"rollout: {{num_rollout: {steps}}}\n")
    file = directory / FILE.format("train", 1)
    file.parent.mkdir(parents=True)
    rows = [json.dumps(_sample(i, randoms)) + "\n" for i in range(SAMPLES)]
    half = SAMPLES // 2  # two members, as the writer makes them
    file.write_bytes(b"".join(gzip.compress("".join(part).encode(), 1) for part in (rows[:half], rows[half:])))
    for step in range(2, steps + 1):
        os.link(file, directory / FILE.format("train", step))


def _sample(index: int, randoms: random.Random) -> dict[str, Any]:
    pieces = [randoms.choice((" the", " sum", " of", " 17", " and", " 4", " is", "\n")) for _ in range(TOKENS)]
    log_probs = [round(-randoms.expovariate(1.0), 6) for _ in pieces]
    return {
        "step": 1,
        "group": index // 8,
        "index": index,
        "prompt": [{"role": "user", "content": f"What is {index} + 4?"}],
        "response": "".join(pieces),
        "reward": round(randoms.random(), 2),
        "status": "completed",
        "metadata": {},
        "weight_versions": [[9, 0]],
        "response_length": TOKENS,
        "tokens": list(range(TOKENS + 9)),
        "rollout_log_probs": log_probs,
        "train_log_probs": [round(p + randoms.gauss(0, 0.01), 6) for p in log_probs],
        "advantages": [round(randoms.gauss(0, 1), 6)] * TOKENS,
        "pieces": pieces,
    }


def proportional_mib(pid: int) -> float:
    """Return a process's memory in MiB; pages that several processes share are divided between them."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def look(url: str) -> dict[str, float]:
    """Open the page in a new browser."""
    with open_browser() as browser:
        started = time.perf_counter()
        browser.open(url)
        browser.wait("document.querySelector('figure canvas')")
        plots = time.perf_counter() - started
        started = time.perf_counter()
        browser.run("location.hash = 'samples'")
        browser.wait("document.querySelector('.token')")
        samples = time.perf_counter() - started
        for _ in range(VISITED):
            shown = browser.run("return location.hash")
            browser.press("[")
            browser.wait(f"location.hash !== {json.dumps(shown)}")
        browser.run("location.hash = 'overview'")
        browser.wait("document.querySelector('figure canvas')")
        return {
            "seconds_plots": plots,
            "seconds_samples": samples,
            "page_mib": max(map(proportional_mib, _renderers())),
        }


def _renderers() -> list[int]:
    """Return the processes of Chromium that draw pages; the benchmark's browser is the only one here."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"--type=renderer" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


def ask(url: str) -> dict[str, float]:
    """Measure the answers of the server that a page needs first."""
    seconds = {}
    listed = f"samples?run=0&kind=train&step={STEPS - VISITED - 5}"
    for name, path in (("overview", "overview"), ("samples", listed), ("search", f"{listed}&text=no+such+text")):
        started = time.perf_counter()
        with urlopen(url + path) as answer:
            seconds[f"mib_{name}"] = len(answer.read()) / 2**20
        seconds[f"seconds_{name}"] = time.perf_counter() - started
    return seconds


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        directory.mkdir()
        make_run(directory, STEPS)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        words = [sys.executable, "-m", "miles_core", "watch", str(directory), "--port", "0"]
        started = time.perf_counter()
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            result: dict[str, Any] = {"seconds_start": time.perf_counter() - started, "server": ask(url)}
            if not MISSING:
                turns = [look(url) for _ in range(given.turns)]
                result["page"] = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
                result["page_most"] = {name: max(turn[name] for turn in turns) for name in turns[0]}
            result["server_mib"] = proportional_mib(server.pid)
        finally:
            server.terminate()
            server.wait()
    shape = {"steps": STEPS, "samples": SAMPLES, "tokens": TOKENS, "metrics": METRICS, "without_browser": MISSING}
    finish("watch_page", {**shape, **result}, given.save, lambda: installed("miles-core"))


if __name__ == "__main__":
    main()
