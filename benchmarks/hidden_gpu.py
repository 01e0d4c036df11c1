"""Whether a process reads the memory of a GPU that CUDA_VISIBLE_DEVICES hides from it, and how fast. Needs two GPUs::

    python benchmarks/hidden_gpu.py --save

The writer sees only the first GPU, the reader only the second, as a trainer rank and an engine do under Ray. The reader copies a bucket and a loan of
``zero_copy`` several times, and verifies their checksums. For each, ``result`` is one of

- ``read``: the bytes are correct;
- ``refused``: the driver does not map the memory. A run then takes the next path (NCCL);
- ``failed``: it was mapped but not read correctly. ``context_works`` tells whether the reader could use its own GPU afterwards: if not, an
  engine would have died, and such memory must not be mapped.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from measure import finish, installed, options

from miles_core.data import Encoded
from miles_core.errors import SyncError
from miles_workers.transport import Bucket, DeviceMemory, Inbox, Loan

NBYTES, SIZE, TIMES = 1 << 30, 64 << 20, 8


def write() -> None:
    """Print the messages of a bucket and a loan, and keep their memory until the reader is done."""
    torch.manual_seed(0)
    torch.ones(1, device="cuda")  # creates the context in which the driver allocates
    memory = DeviceMemory(NBYTES, torch.device("cuda", 0))
    bucket, loan = Bucket(memory.buffer), Loan()
    filled = True
    while filled:
        name = f"w{len(bucket.units)}"
        filled = bucket.add(Encoded(name, {name: torch.randn(SIZE // 2, device="cuda").to(torch.bfloat16)}))
    tensors = [torch.randn(SIZE // 2, device="cuda").to(torch.bfloat16) for _ in range(NBYTES // SIZE)]
    lent = [loan.add(f"w{number}", tensor) for number, tensor in enumerate(tensors)]
    torch.cuda.synchronize()
    print(json.dumps(bucket.header() | {"memory": memory.memory}), flush=True)
    print(json.dumps(loan.message() if all(lent) else None), flush=True)
    sys.stdin.read()


def read() -> None:
    """Read the bucket and the loan of the messages on standard input; print a result for each."""
    own = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    for line in sys.stdin:
        message = json.loads(line)
        if message is None:
            print(json.dumps({"result": "not lent: torch's memory has no handles"}), flush=True)
            continue
        hidden = str(torch.cuda.get_device_properties(0).uuid) not in line
        found: dict[str, Any] = {"gpu_is_hidden": hidden, "bytes": message["nbytes"], "result": "read"}
        try:
            seconds = list(copy_times(message, own))
            found["first_seconds"] = round(seconds[0], 4)
            found["gb_per_second"] = round(message["nbytes"] / statistics.median(seconds[1:]) / 1e9, 2)
        except Exception as error:
            refused = isinstance(error, SyncError) and "driver did not provide" in str(error)
            found |= {"result": "refused" if refused else "failed", "error": f"{type(error).__name__}: {error}"[:500]}
            found["context_works"] = works()
        print(json.dumps(found), flush=True)


def copy_times(message: dict[str, Any], own: torch.Tensor) -> Iterator[float]:
    """Copy the tensors of a message several times; yield the seconds. The checksum is verified each time."""
    inbox = Inbox()
    for _ in range(TIMES):
        torch.cuda.synchronize()
        start, at = time.perf_counter(), 0
        for unit in inbox.open(message):
            for tensor in unit.parts.values():
                unit.copy(own[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor)
                at += tensor.nbytes
        torch.cuda.synchronize()
        yield time.perf_counter() - start


def works() -> bool:
    """Return whether this process can still use its GPU."""
    try:
        torch.cuda.synchronize()
        return int(torch.ones(8, device="cuda").sum()) == 8
    except RuntimeError:
        return False


def run() -> dict[str, Any]:
    """Start both processes; return what the reader found."""
    given = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")

    def start(role: str, gpu: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__, role], env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    writer, reader = start("write", given[0]), start("read", given[1])
    assert writer.stdout is not None
    found: dict[str, Any] = {}
    try:
        messages = writer.stdout.readline() + writer.stdout.readline()
        lines, _ = reader.communicate(messages, timeout=60)
        found = dict(zip(("bucket", "loan"), map(json.loads, lines.splitlines()), strict=False))
    except subprocess.TimeoutExpired:
        found["reader"] = "hangs"
    finally:
        reader.kill()
        writer.communicate(timeout=30)
    return found | {"exit_of_reader": reader.wait(), "exit_of_writer": writer.returncode}


def main() -> None:
    role = sys.argv[1] if len(sys.argv) > 1 else ""
    if role == "write":
        write()
    elif role == "read":
        read()
    else:
        given = options(__doc__).parse_args()
        finish("hidden_gpu", run(), given.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
