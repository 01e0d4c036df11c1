"""A SkyPilot task: SkyPilot rents the machines and runs the same script on each.

SkyPilot's own Ray listens at port 6380, so the run's cluster has another port, and its processes are ended by their id.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from miles_planner.launch.job import PORT, Job

SUFFIX = ".yaml"


def write(job: Job) -> str:
    """Return the task."""
    resources: dict[str, Any] = {"accelerators": f"{job.gpu}:{job.gpus}", "network_tier": "best"}
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    task = {
        "name": job.name,
        "num_nodes": job.machines,
        "resources": resources,
        "envs": {"MILES_PLAN": job.header},
        "run": _script(job),
    }
    return yaml.dump(task, Dumper=_Dumper, sort_keys=False, width=200)


def _script(job: Job) -> str:
    """Return what every machine runs: the first is Ray's head and runs the driver, the others serve it until it ends."""
    lines = [
        "set -euo pipefail",
        f"shared={shlex.quote(job.shared)}",
        '[ -d "$shared" ] || { echo "$shared is not mounted on $(hostname): every machine needs the shared directory" >&2; exit 1; }',
        'first=$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
        'if [ "$SKYPILOT_NODE_RANK" != 0 ]; then',
        "    sleep 15",
        f'    ray start --address="$first:{PORT}" --num-gpus={job.gpus} --disable-usage-stats --block || echo "the head has ended"',
        "    exit 0",
        "fi",
        f"ray start --head --port={PORT} --num-gpus={job.gpus} --disable-usage-stats --block &",
        "head=$!",
        "trap 'kill \"$head\" 2> /dev/null || true' EXIT",
        "sleep 10",
        f'export RAY_ADDRESS="$first:{PORT}"',
        job.wait_for_machines(),
        f"timeout --signal=TERM {job.hours}h {job.command_line}",
    ]
    return "\n".join(lines) + "\n"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that the script stays readable."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def submit(path: str) -> str:
    """Return the command that starts the job."""
    return f"sky launch {shlex.quote(path)}"
