"""Throughput of the number formats: one weight quantised and dequantised, against a plain copy of it.

Bytes are those that must move, read plus written: the BF16 weight and what it is stored as; for activations a BF16
tensor in and out. The fraction is of the bandwidth that a copy of the BF16 weight reaches in the same run, and the ways
take turns (copy, format A, format B, copy, ...), so a slow minute slows all of them. On a GPU every format runs twice:
its kernel (where it has one for this device), and its reference, the tensor operations that run anywhere and give the
same bytes. The last line is one JSON object.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.measure import finish, installed, options
from miles_core.precision.format import Format
from miles_formats.convert.installed import format_class, providers
from miles_formats.gpu_kernel import reference_only

Way = tuple[str, str, str]  # format, what is done, how


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--rows", type=int, help="N (default: 4096 on a CPU, 16384 on a GPU)")
    parser.add_argument("--columns", type=int, help="K (default: 4096 on a CPU, 8192 on a GPU)")
    parser.add_argument("--turns", type=int, default=7, help="measured turns (default: 7)")
    parser.add_argument("--formats", nargs="+", default=sorted(providers()), help="default: all installed ones")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    gpu = args.device != "cpu"
    shape = (args.rows or (16384 if gpu else 4096), args.columns or (8192 if gpu else 4096))
    load = os.getloadavg()[0]
    weight = torch.randn(shape, device=args.device, generator=torch.Generator(args.device).manual_seed(0)).bfloat16()
    ways = {("copy", "copy", "torch"): (copying(weight), 2 * size(weight))}
    for name in args.formats:
        ways |= of_format(name, format_class(name)(), weight, gpu)
    seconds = measure({way: run for way, (run, _) in ways.items()}, args.turns, gpu)
    speed = {way: count / statistics.median(seconds[way]) / 1e9 for way, (_, count) in ways.items()}
    copy = speed.pop(("copy", "copy", "torch"))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (name, what, how), value in speed.items():
        row = {"gb_per_s": round(value, 2), "of_copy": round(value / copy, 4)}
        found.setdefault(name, {}).setdefault(what, {})[how] = row
    for name, what in {way[:2]: None for way in speed}:
        hows = found[name][what]
        if "kernel" in hows and "reference" in hows:
            hows["kernel_over_reference"] = round(hows["kernel"]["gb_per_s"] / hows["reference"]["gb_per_s"], 1)
    result = {
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {args.threads} thread(s)",
        "load_average_before": round(load, 2),
        "shape": list(shape),
        "dtype": "bfloat16",
        "turns": args.turns,
        "copy_gb_per_s": round(copy, 2),
        "formats": found,
    }
    names = ["torch", "miles-core", *(["triton"] if gpu else [])]
    finish("format_throughput", result, args.save, lambda: installed(*names), variant=args.device.partition(":")[0])


def of_format(
    name: str, format: Format, weight: torch.Tensor, gpu: bool
) -> dict[Way, tuple[Callable[[], object], int]]:
    """What is done with one format -> it, and the bytes it must read and write."""
    stats, parts = format.stats(weight), format.quantize(weight)
    stored = sum(size(t) for t in parts.values())

    def reference(run: Callable[[], object]) -> Callable[[], object]:
        def run_reference() -> object:
            with reference_only():
                return run()

        return run_reference

    runs: dict[str, tuple[Callable[[], object], int]] = {
        "quantize": (lambda: format.quantize(weight, stats, parts), size(weight) + stored),
        "dequantize": (lambda: format.dequantize(parts), stored + 4 * weight.numel()),
    }
    if stats is not None:
        runs["statistics"] = (lambda: format.stats(weight), size(weight))
    if format.quantizes_activations:
        runs["activation"] = (lambda: format.fake_quantize_activation(weight), 2 * size(weight))
    ways = {}
    for what, (run, count) in runs.items():
        ways[name, what, "reference"] = (reference(run), count)
        if gpu:
            ways[name, what, "kernel"] = (run, count)
    return ways


def measure(runs: dict[Way, Callable[[], object]], turns: int, gpu: bool) -> dict[Way, list[float]]:
    """Seconds of each, one of every turn; the first two turns are not kept."""
    found: dict[Way, list[float]] = {way: [] for way in runs}
    for turn in range(turns + 2):
        for way, run in runs.items():
            seconds = on_gpu(run) if gpu else on_cpu(run)
            if turn >= 2:
                found[way].append(seconds)
        print(f"turn {turn + 1}/{turns + 2}", file=sys.stderr, flush=True)
    return found


def on_gpu(run: Callable[[], object]) -> float:
    """Seconds on the GPU between two events. The GPU waits in front of them until the host has launched everything, so the host's time does
    not count."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    torch.cuda._sleep(4_000_000)  # clock cycles
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def on_cpu(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def copying(weight: torch.Tensor) -> Callable[[], object]:
    target = torch.empty_like(weight)
    return lambda: target.copy_(weight)


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    main()
