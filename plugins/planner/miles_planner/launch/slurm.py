"""A Slurm batch script: Ray on every machine, and the driver on the first machine."""

from __future__ import annotations

import math
import shlex

from miles_planner.launch.job import PORT, Job

SUFFIX = ".sbatch"
#: Seconds between the end of ``--stop-within`` and the time limit.
MARGIN = 30


def write(job: Job) -> str:
    """Return the script. Containers need Slurm's plugin Pyxis (``srun --container-image``)."""
    container = (
        f"(--container-image={shlex.quote(job.image)} --container-mounts={shlex.quote(f'{job.shared}:{job.shared}')})"
    )
    lines = [
        *_settings(job),
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
        "# Steps overlap: Ray's processes hold the GPUs, and other steps run next to them.",
        'run_on() { srun "${step[@]}" --nodes=1 --ntasks=1 --nodelist="$1" "${container[@]}" "${@:2}"; }',
        'pids=() signalled="" driver="$shared/.miles-$SLURM_JOB_ID.pid"',
        'stop() { rm -f "$driver"; [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2> /dev/null || true; }',
        "trap stop EXIT",
        "# At the time limit Slurm signals all processes, and Ray's would not live until the driver has saved its last step. Before it, Slurm",
        "# signals only this script, which runs on the first machine and signals only the driver.",
        'trap \'signalled=1; kill -TERM "$(< "$driver")" || exit 143\' TERM',
        "# Each of the other machines tries until the first one answers, which takes minutes if it has to unpack an image.",
        'for machine in "${machines[@]:1}"; do',
        '    run_on "$machine" bash -c \'until ray start "$@"; do sleep 5; done\' join'
        f' --address="$address" --num-gpus={job.gpus} --disable-usage-stats --block &',
        '    pids+=("$!")',
        "done",
        "",
        "# One step for the head and the driver, because Ray connects them through files of their container.",
        f"wait={shlex.quote(job.wait_for_machines())}",
        f'run_on "$first" bash -c \'ray start --head --port={PORT} --num-gpus={job.gpus} --disable-usage-stats && '
        'export RAY_ADDRESS="$1" && python3 -c "$0" && echo "$$" > "$2" && exec "${@:3}"\' "$wait" "$address" "$driver" '
        f"{job.command_line} &",
        'pids+=("$!")',
        'status=0; wait "${pids[-1]}" || status=$?',
        '[ -z "$signalled" ] || { status=0; wait "${pids[-1]}" || status=$?; } # the signal ended the first wait',
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _settings(job: Job) -> tuple[str, ...]:
    """Return the lines from which ``sbatch`` reads its options."""
    return (
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.machines}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={job.gpus}",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        f"#SBATCH --time={job.hours}:00:00",
        f"#SBATCH --signal=B:TERM@{math.ceil(job.stop_within) + MARGIN}",
        "#SBATCH --output=%x-%j.log",
    )


def submit(path: str) -> str:
    """Return the command that starts the job."""
    return f"sbatch {shlex.quote(path)}"
