"""Why engine and trainer differ by more over an FP8 base than over a BF16 or INT4 base: the gap by cause.

    python benchmarks/mismatch/lora_gap.py --save                                                    # CPU, minutes
    python benchmarks/mismatch/lora_gap.py --device cuda --hidden 2048 --layers 12 --answer 128      # one GPU

Part ``runs``: ``mismatch/abs_log_prob`` of one step of a random dense model with new adapters (rank 16, all linear layers, adapter-only
sync), so that engine and trainer compute the same function. The runs differ in one thing each: the base's format, whether the inputs of the
layers are rounded, the dtype of all other computations, and (``exact``) whether both sides add in one order (``true_on_policy``).

Part ``rounding``: two BF16 inputs of a layer that are equal except for one unit in the last place in some elements, before and after E4M3 rounding in
blocks of 128: the share of elements that differ, and the RMS of the difference divided by that of the input. The last line of the output is one
JSON object.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.training.forked import Clock, in_fork
from benchmarks.training.random_model import import_family, make_checkpoint

RANK = 16
#: Run -> format of the base, dtype, whether the format's rounding of inputs applies, whether true_on_policy does.
RUNS: dict[str, tuple[str, str, bool, bool]] = {
    "bf16": ("bf16", "bfloat16", True, False),
    "int4": ("int4", "bfloat16", True, False),
    "fp8, inputs not rounded": ("fp8", "bfloat16", False, False),
    "fp8": ("fp8", "bfloat16", True, False),
    "bf16, in FP32": ("bf16", "float32", True, False),
    "int4, in FP32": ("int4", "float32", True, False),
    "fp8, in FP32": ("fp8", "float32", True, False),
    "bf16, in FP32, exact": ("bf16", "float32", True, True),
    "fp8, in FP32, exact": ("fp8", "float32", True, True),
    "fp8, exact": ("fp8", "bfloat16", True, True),
}
#: Shares of elements that differ by one unit in the last place, of the part ``rounding``.
SHARES = (0.01, 0.1, 0.5)


def gap(given: argparse.Namespace, name: str, checkpoint: Path) -> dict[str, Any]:
    """One step in this process."""
    import torch

    from miles_formats import Format
    from miles_testing import toy_run

    torch.set_num_threads(given.threads)
    base, dtype, rounds, exact = RUNS[name]
    plugins = ["lora", *([base] if base != "bf16" else []), *(["true_on_policy"] if exact else [])]
    more: dict[str, Any] = {} if base == "bf16" else {"train_precision": base, "rollout_precision": base}
    if base != "bf16":
        more["emulate_precision"] = True
    if not rounds:
        from miles_fp8.format import Fp8

        Fp8.fake_quantize_activation = Format.fake_quantize_activation
    more |= {"lora_target_modules": "all-linear", "lora_rank": RANK, "lora_sync": "adapter", "save_rollouts": False}
    more |= {
        "device": given.device,
        "dtype": dtype,
        "hf_checkpoint": checkpoint,
        "n_samples_per_prompt": given.samples // 2,
    }
    with tempfile.TemporaryDirectory() as directory:
        done = toy_run(plugins, Path(directory, "run"), steps=1, rollout_max_response_len=given.answer, **more)
    return {"abs_log_prob": float(f"{done.metrics[0]['mismatch/abs_log_prob']:.4g}")}


def rounding() -> dict[str, Any]:
    """Differences of one layer's inputs before and after E4M3 rounding."""
    import torch

    from miles_fp8.format import Fp8

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 1024, generator=generator).to(torch.bfloat16)
    round_inputs, found = Fp8().fake_quantize_activation, {}
    norm = x.float().square().mean().sqrt()
    for share in SHARES:
        apart = torch.rand(x.shape, generator=generator) < share
        other = torch.where(apart, (x.view(torch.int16) + 1).view(torch.bfloat16), x)
        pairs = {"before": (x, other), "after": (round_inputs(x), round_inputs(other))}
        rms = {k: float((a.float() - b.float()).square().mean().sqrt() / norm) for k, (a, b) in pairs.items()}
        found[str(share)] = {
            "differ_before": float(f"{(x != other).float().mean():.3g}"),
            "differ_after": float(f"{(pairs['after'][0] != pairs['after'][1]).float().mean():.3g}"),
            "rms_before": float(f"{rms['before']:.4g}"),
            "rms_after": float(f"{rms['after']:.4g}"),
            "ratio": float(f"{rms['after'] / rms['before']:.3g}"),
        }
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--runs", nargs="*", default=None, choices=list(RUNS), help="runs of the part runs")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--layers", type=int, default=8, help="layers")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--samples", type=int, default=16, help="samples of a step")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    given = parser.parse_args()
    names = ("hidden", "layers", "answer", "samples", "device")
    result: dict[str, Any] = {**{name: getattr(given, name) for name in names}, "runs": {}}
    versions = ("miles-core", "miles-plugin-lora", "miles-plugin-fp8", "miles-plugin-int4", "torch", "transformers")

    def save(quiet: bool) -> None:
        finish(Path(__file__).stem, result, given.save, lambda: installed(*versions), given.variant, quiet)

    clock = Clock()
    import_family("qwen3")
    clock.note("imports")
    result["rounding"] = in_fork(rounding)
    sizes = {"hidden_size": given.hidden, "intermediate_size": 3 * given.hidden, "num_hidden_layers": given.layers}
    sizes |= {"num_attention_heads": given.hidden // 64, "num_key_value_heads": max(given.hidden // 256, 1)}
    sizes |= {"head_dim": 64, "vocab_size": 4096}
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint("qwen3", Path(directory, "model"), sizes, given.device)
        # libraries of many CPUs have no BF16 products whose rows are independent
        for name in given.runs or [n for n in RUNS if given.device == "cuda" or n != "fp8, exact"]:
            result["runs"][name] = in_fork(partial(gap, given, name, Path(directory, "model")))
            print(f"{name:<26}", result["runs"][name], file=sys.stderr, flush=True)
            clock.note(name)
            save(quiet=True)
    save(quiet=False)


if __name__ == "__main__":
    main()
