"""Whether a process reads the memory of a GPU that CUDA_VISIBLE_DEVICES hides from it, and how fast. Needs two GPUs::

    python benchmarks/hidden_gpu.py --save

The writer sees only the first GPU, the reader only the second, as a trainer rank and an engine do under Ray.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from measure import finish, installed, options

from miles_transport import Bucket, DeviceMemory, Inbox

NBYTES, TIMES = 1 << 30, 8


def write() -> None:
    """Fill a bucket, print its message, and keep the memory until the reader is done."""
    from miles_core.data import Encoded

    torch.manual_seed(0)
    memory = DeviceMemory(NBYTES, torch.device("cuda", 0))
    bucket = Bucket(memory.buffer)
    size = 64 << 20
    while bucket.end + size <= NBYTES:
        name = f"w{len(bucket.units)}"
        bucket.add(Encoded(name, {name: torch.randn(size // 2, device="cuda").to(torch.bfloat16)}))
    print(json.dumps(bucket.header() | {"memory": memory.memory}), flush=True)
    sys.stdin.read()


def read() -> dict[str, Any]:
    """Read the bucket of the message on standard input several times; its checksum is verified each time."""
    message, inbox, seconds = json.loads(sys.stdin.readline()), Inbox(), []
    own = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    for _ in range(TIMES):
        torch.cuda.synchronize()
        start, at = time.perf_counter(), 0
        for unit in inbox.open(message):
            for tensor in unit.parts.values():
                unit.copy(own[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor)
                at += tensor.nbytes
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "bytes": message["nbytes"],
        "hidden": message["memory"]["gpu"] != str(torch.cuda.get_device_properties(0).uuid),
        "gb_per_second": round(message["nbytes"] / statistics.median(seconds[1:]) / 1e9, 2),
        "first_seconds": round(seconds[0], 4),
    }


def run() -> dict[str, Any]:
    """Start both processes; return what the reader measured."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")

    def start(role: str, gpu: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__, role], env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    writer, reader = start("write", given[0]), start("read", given[1])
    assert writer.stdout is not None
    try:
        said, _ = reader.communicate(writer.stdout.readline(), timeout=120)
    finally:
        writer.communicate(timeout=60)
        reader.kill()
    return json.loads(said) if reader.returncode == 0 else {"failed": reader.returncode}


def main() -> None:
    role = sys.argv[1] if len(sys.argv) > 1 else ""
    if role == "write":
        write()
    elif role == "read":
        print(json.dumps(read()))
    else:
        given = options(__doc__).parse_args()
        finish("hidden_gpu", run(), given.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
