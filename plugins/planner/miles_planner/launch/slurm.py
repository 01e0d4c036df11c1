"""A Slurm batch script: one Ray process per machine, then the driver on the first machine."""

from __future__ import annotations

import shlex

from miles_planner.launch.job import PORT, Job

SUFFIX = ".sbatch"


def write(job: Job) -> str:
    """Return the script. Containers need Slurm's plugin Pyxis (``srun --container-image``)."""
    container = (
        f"(--container-image={shlex.quote(job.image)} --container-mounts={shlex.quote(f'{job.shared}:{job.shared}')})"
    )
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.machines}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={job.gpus}",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        f"#SBATCH --time={job.hours}:00:00",
        "#SBATCH --output=%x-%j.log",
        f"# {job.header}",
        "set -euo pipefail",
        "",
        f"shared={shlex.quote(job.shared)}",
        "# Each step takes all processors of its machines, not one per task.",
        'step=(--overlap --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none)',
        'srun "${step[@]}" --ntasks-per-node=1 bash -c \'[ -d "$0" ] ||'
        ' { echo "$0 is not mounted on $(hostname): every machine needs the shared directory" >&2; exit 1; }\' "$shared"',
        'mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "first=${machines[0]}",
        f'address="$first:{PORT}"',
        f"container={container if job.image else '()'}",
        "",
        "# Steps overlap: Ray's processes hold the GPUs, and the driver runs next to them.",
        'run_on() { srun "${step[@]}" --nodes=1 --ntasks=1 --nodelist="$1" "${container[@]}" "${@:2}"; }',
        "pids=()",
        'stop() { [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2> /dev/null || true; }',
        "trap stop EXIT",
        f'run_on "$first" ray start --head --port={PORT} --num-gpus={job.gpus} --disable-usage-stats --block &',
        'pids+=("$!")',
        "sleep 10",
        'for machine in "${machines[@]:1}"; do',
        f'    run_on "$machine" ray start --address="$address" --num-gpus={job.gpus} --disable-usage-stats --block &',
        '    pids+=("$!")',
        "done",
        "",
        'export RAY_ADDRESS="$address"',
        f'run_on "$first" {job.wait_for_machines()}',
        f'run_on "$first" {job.command_line}',
    ]
    return "\n".join(lines) + "\n"


def submit(path: str) -> str:
    """Return the command that starts the job."""
    return f"sbatch {shlex.quote(path)}"
