"""The mismatch budget of a small trained mixture of experts, for several pairs of number formats.

The demo's model is warmed up on its demonstrations; then engine and trainer are built in BF16 on the CPU and answer
``--prompts`` prompts, for each setup below with routing replay at hand, so that its part is measured. Every gap comes
with a bootstrap interval over prompts (2,000 draws, fixed seed). Formats are emulated: same codes, no tensor cores.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import finish, installed, options

#: name -> further flags.
SETUPS = {
    "BF16 rollout, BF16 training": (),
    "FP8 rollout, BF16 training": ("--rollout-precision", "fp8"),
    "FP8 rollout, BF16 training, FP8 cache": ("--rollout-precision", "fp8", "--kv-cache-dtype", "float8_e4m3fn"),
    "FP8 rollout, FP8 training": ("--rollout-precision", "fp8", "--train-precision", "fp8"),
    "BF16 both, top-p 0.8 scored over the whole vocabulary": ("--rollout-top-p", "0.8", "--full-vocab-logprobs"),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prompts", type=int, default=512, help="one response each")
    parser.add_argument("--sft-steps", type=int, default=200, help="warm start of the model")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    given = parser.parse_args()
    import torch

    from miles_tools.report.budget_table import BUDGET_COLUMNS, budget_rows

    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        warmed_up(directory, given)
        for name, flags in SETUPS.items():
            result = asyncio.run(measure(directory, given, flags))
            found[name] = result
            print(f"\n{name}\n" + " | ".join(BUDGET_COLUMNS))
            print("\n".join(" | ".join(row) for row in budget_rows(result)))
    names = ("torch", "transformers", "miles-core")
    setup = {"prompts": given.prompts, "sft_steps": given.sft_steps, "seed": given.seed, "dtype": "bfloat16"}
    finish("mismatch_budget", {**setup, "budgets": found}, given.save, lambda: installed(*names))


def warmed_up(directory: Path, given: Any) -> None:
    """Train the demo's model on its demonstrations and write it to ``trained/``."""
    from miles_core.cli import train
    from miles_tools.demo.inputs import make_inputs, train_arguments

    make_inputs(directory, given.seed)
    words = train_arguments(directory, given.seed, ())
    more = f"--num-rollout 0 --sft-steps {given.sft_steps} --export-hf {directory}/trained --log-level warning"
    train.run([*words, *more.split()])


async def measure(directory: Path, given: Any, flags: tuple[str, ...]) -> dict[str, Any]:
    """One setup's budget, with an interval for the gap that training sees and for the whole one."""
    from miles_core.config.load import load
    from miles_core.mismatch.budget import budget
    from miles_core.mismatch.probe import bare, probe, probe_prompts
    from miles_core.run.make import make_run
    from miles_core.run.parts import build_parts
    from miles_core.run.prepare import apply_plan, prepare

    words = f"""--hf-checkpoint {directory}/trained --prompt-data {directory}/data/train.jsonl --input-key prompt
        --label-key label --rm-type exact --plugins r3,fp8 --emulate-precision --dtype bfloat16 --device cpu
        --rollout-max-response-len 4 --seed {given.seed}"""
    config = load([*words.split(), *flags])
    plan, catalogue = prepare(config)
    run = make_run(apply_plan(config, plan), plan, catalogue, directory / "run")
    async with build_parts(run) as (parts,):
        parts.policy.version = (await parts.learner.push(0)).version
        samples = await probe(run, parts.engine, probe_prompts(run, given.prompts), support=True)
        result = (await budget(run, parts, samples)).to_dict()
        plain = await parts.learner.log_probs([bare(s) for s in samples])
        per_prompt = [np.abs(t - np.asarray(s.rollout_log_probs)).sum() for t, s in zip(plain, samples, strict=True)]
        counts = [s.response_length for s in samples]
        result["total_interval_95"] = interval(np.asarray(per_prompt), np.asarray(counts), given.seed)
        return result


def interval(sums: np.ndarray, counts: np.ndarray, seed: int) -> list[float]:
    """95 % bootstrap interval of the mean over tokens, resampling prompts."""
    draws = np.random.default_rng(seed).integers(len(sums), size=(2000, len(sums)))
    means = sums[draws].sum(1) / counts[draws].sum(1)
    return [float(q) for q in np.quantile(means, [0.025, 0.975])]


if __name__ == "__main__":
    main()
