"""Run the steps of docker/Dockerfile in a Debian root directory, without a container daemon and without CUDA (Linux, as root).

    debootstrap --variant=minbase --include=ca-certificates bookworm /var/tmp/root http://deb.debian.org/debian
    python docker/try_steps.py /var/tmp/root --wheels DIR

The image has CUDA, Ubuntu's Python 3.12, and engines that need a GPU. Here Debian's Python and PyTorch for CPUs take their place, and the step
that installs the engines is left out (``make constraints`` resolves their versions). With ``--engines`` all wheels of that step, those for CUDA
included, are unpacked for Python 3.12 into a folder of the root; TransformerEngine's extension is not, because the image compiles it.
Everything else runs as it is written. Then
``miles doctor`` and a short ``miles demo`` run in the root. Mounts are private to this process, so nothing of them is left.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
TORCH = "2.13.0+cpu"
#: Text of a step -> what replaces it in a Debian root without CUDA.
REPLACED = (
    (r"python3\.12", "python3"),
    # the engines; torch without CUDA is installed instead
    (r"(&& uv pip install [^&]*)\btorch\b([^&]*)&&[^&]*\bsglang\b[^&]*$", rf"\1 torch=={TORCH}\2"),
    (r"> /lock/constraints\.txt", rf"| sed 's/^torch==.*/torch=={TORCH}/' > /lock/constraints.txt"),
)
#: The engines' step, for another Python than that of the root; the constraints are those for CUDA again.
UNPACKED = r"""
sed -nE 's/^([A-Za-z0-9._-]+)(\[[a-z]+\])?(==[^ ]+).*/\1\3/p' /lock/{common,sglang,megatron,gpu}.txt > /lock/cuda.txt
grep -v '^transformer-engine' /lock/gpu.txt > /lock/wheels.txt
uv pip install --no-cache --target /opt/engines --python-version 3.12 --only-binary :all: --constraint /lock/cuda.txt \
    --override /lock/overrides.txt torch sglang megatron-core -r /lock/wheels.txt
ls -d /opt/engines/*.dist-info | wc -l; du -sh /opt/engines
"""
#: Commands that a user of the image tries first.
TRIED = (
    "miles doctor",
    "cd /workspace && miles demo --device cpu --sft-steps 4 --num-rollout 1 --eval-interval 1 --dir demo",
)


def read_steps(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile, as (name, rest), with continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    for line in joined.splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def adapt(command: str) -> str:
    """Return a RUN command for a Debian root without CUDA."""
    for pattern, replacement in REPLACED:
        command = re.sub(pattern, replacement, command)
    return command


def copy(root: Path, rest: str) -> None:
    """Carry out a COPY: files of this checkout, or all that git tracks."""
    *sources, target = rest.split()
    there = root / target.strip("/")
    there.mkdir(parents=True, exist_ok=True)
    if sources == ["."]:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", there], input=archive, check=True)
        return
    for source in sources:
        (there / Path(source).name).write_bytes((ROOT / source).read_bytes())


def run(root: Path, command: str, environment: dict[str, str]) -> None:
    """Run a command in the root; raises SystemExit if it fails."""
    print(f"$ {' '.join(command.split())}", file=sys.stderr, flush=True)
    mounts = 'mount --bind /dev "$1/dev" && mount -t proc proc "$1/proc" && chroot "$1" bash -ec "$2"'
    start = time.monotonic()
    inside = ["unshare", "--mount", "--propagation", "private", "bash", "-ec", mounts, "-", str(root), command]
    code = subprocess.run(inside, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    print(f"{'FAILED' if code else 'ok'}  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if code:
        raise SystemExit(f"this step of the Dockerfile fails in {root}: {command}")


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path, help="directory made by debootstrap")
    parser.add_argument("--wheels", type=Path, help="directory with wheels, such as torch for CPUs")
    parser.add_argument(
        "--engines", action="store_true", help="also unpack the wheels of SGLang, Megatron-Core and CUDA"
    )
    given = parser.parse_args()
    if os.geteuid() or not (given.root / "etc" / "debian_version").is_file():
        raise SystemExit(f"{given.root}: this needs root, and a directory made by debootstrap")
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    environment |= {"LC_ALL": "C.UTF-8", "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt"}
    environment["UV_COMPILE_BYTECODE_TIMEOUT"] = "600"  # a machine that others use, too
    for file in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
        if Path("/", file).is_file():
            (given.root / file).parent.mkdir(parents=True, exist_ok=True)
            (given.root / file).write_bytes(Path("/", file).read_bytes())
    if given.wheels is not None:
        subprocess.run(["cp", "-r", given.wheels, given.root / "wheels"], check=True)
        environment |= {"PIP_FIND_LINKS": "/wheels", "UV_FIND_LINKS": "/wheels"}
    for name, rest in read_steps((HERE / "Dockerfile").read_text(encoding="utf-8")):
        if name == "ENV":
            for key, value in re.findall(r"(\w+)=(\S+)", rest):
                environment[key] = value.replace(f"${key}", environment.get(key, ""))
        elif name == "COPY":
            copy(given.root, rest)
        elif name == "RUN":
            run(given.root, adapt(rest), environment)
        elif name == "WORKDIR":
            (given.root / rest.strip("/")).mkdir(parents=True, exist_ok=True)
    for command in (*([UNPACKED] if given.engines else []), *TRIED):
        run(given.root, command, environment)


if __name__ == "__main__":
    main()
