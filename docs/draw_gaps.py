"""Writes ``exact.md`` from the newest results of ``benchmarks/mismatch/true_on_policy.py``, ``sglang_exact.py``, and ``collapse.py``.

Run ``python docs/draw_gaps.py``; a test fails while the page is older than the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
PAGE = DOCS / "exact.md"
INTRODUCTION = """\
# Exact log-probabilities, by family and format

The table shows the largest difference of a token's log-probability between the embedded engine and trainer, in nats, without and with
[`true_on_policy`](../plugins/true_on_policy/README.md). Engine and trainer have the same weights. The engine samples seven requests at
different batch sizes, and the trainer scores them in micro-batches of 1, 3 and all samples, with and without shared prompts
(`benchmarks/mismatch/true_on_policy.py`). The models are tiny and random. "0" means that every token is bit-identical.
"""
TIMES = """\
## Time of a step

Whole GRPO steps of random BF16 models on an H200, 32 prompts of 64 tokens with 8 samples of 256 tokens each, micro-batches of 36,000 tokens
(part `time` of `benchmarks/mismatch/true_on_policy.py`). Runs with and without the plugin alternate. The ratio is the median over
pairs of runs, with a 95 % confidence interval of the median; with fewer than six pairs the interval is the range of the pairs. The
columns "rollout" and "training" are ratios of medians. Since this was measured, both sides became faster, with the plugin more than without it:
[a later comparison](performance.md#inside-miles-train) has 1.01 (dense) and 1.03 (mixture of experts).
"""
SGLANG = """\
## SGLang

Mean |Δ log p| in nats per token between SGLang 0.5.17 and the embedded trainer, for a random BF16 model on an H100. "Alone and together"
is the dependence on the batch, "sampled and scored" compares decoding with scoring, and the columns with FP32 are the rounding errors of
each side. `benchmarks/mismatch/sglang_exact.py` explains the variants.
"""
SWITCHES = """\
The scores of a sequence alone and together with 31 others were equal, even without deterministic inference. Inside SGLang, decoding
already differs from scoring. The rest is BF16 rounding: two BF16 computations of one function differ from each other about as much as each
differs from FP32.

SGLang's switches do not close the gap. Deterministic inference makes SGLang repeatable. `on_policy_target` imitates another trainer's
operations and keeps residuals in FP32, so it is closer to FP32 and further from this trainer. The gap is exactly 0 only if both sides run
the same kernels: `shared_kernels` (`miles_true_on_policy.inside_sglang` inside SGLang) with `true_on_policy` in the trainer.
Compared with the trainer without the plugin, this variant has the same gap as any two BF16 computations.

SGLang 0.5.17 cannot run Qwen3's mixtures of experts with `on_policy_target`. The switch selects a rotary embedding in plain PyTorch, but
the model's attention expects the embedding to also write keys and values into the cache, which only the fused kernel does. The assertion
above stops SGLang when it starts. The dense model writes the cache in its attention layer, so the switch works there. SGLang's pull
request 40289, open at the time of writing, does the same for mixtures of experts.

Other sizes of decode batches were not compared here. `--engine sglang --true-on-policy-mode` selects the shared kernels for a run, without
CUDA graphs; the run checks at its start that the gap is 0 (`qwen3` and `qwen3_moe` on one Hopper GPU for each engine; the plan refuses others).
"""
PARTIAL = """\
## Partial rollouts

With `--partial-rollout` or `--schedule async` a response may have tokens of several weight versions. Each token is exact for the weights that
generated it:

- A token that the current weights generated has the log-probability that the trainer computes for it. `mismatch/current_abs_log_prob` and
  `mismatch/current_abs_log_prob_max` compare only these tokens, and are exactly 0.0 at every step.
- A token that older weights generated has the log-probability that the trainer computed with those weights. Its difference from the
  current log-probability is the change of the policy, which `mismatch/abs_log_prob` includes.

The engine drops its cache at a weight update and computes prompt and response again with the new weights, as the trainer does. The current
tokens depend on this second computation of the older ones, so with `r3` the trainer must replay the experts that it selected. The plan
therefore sets `--r3-recomputed-routes newest`. With `sampled`, the default of `r3`, the gap of current tokens was up to 0.48 nats in eight
steps of a toy model with `--lr 1e-2`.

| `--pause-generation-mode` | with `--true-on-policy-mode` |
|---|---|
| `abort` (default) | exact |
| `retract` | exact without `r3`; refused with it, because the engine then returns the experts selected when a token was sampled |
| `in_place` | refused: cached keys and values are those of older weights |

`plugins/true_on_policy/tests/test_partial.py` runs twenty steps with `r3` and responses of two versions, at two batch sizes on a CPU. Before each
update it loads the weights of each version into the trainer again: the gap is 0.0 for every token of every version. SGLang on
an H200, twenty steps each of a dense model (64 rows) and of a mixture of experts with `r3` (32 and 256 rows), also has a gap of 0.0 at every
step; 70 to 75 % of the trained tokens were generated by older weights
([results](../benchmarks/results/sglang_exact_run-2026-11-30-partial.json), `sglang_exact_run.py --partial`).
"""
UNKNOWN = """\
## Does the gap matter?

No result yet. `benchmarks/mismatch/collapse.py` trains a small mixture of experts at the edge of stability with seven arms (BF16; an FP8 rollout
plain, with `tis`, with `r3` and with both; FP8 on both sides; `true_on_policy`) and three seeds. No complete set of runs exists, so this page cannot
say whether a gap of exactly 0 prevents a collapse, or whether `tis` and `r3` suffice.
"""
COLLAPSE = """\
## Does the gap matter?

A small mixture of experts learns running sums, first from a teacher that makes errors and then with GRPO without a KL term, with eight
optimizer steps per rollout (`benchmarks/mismatch/collapse.py`). The arms differ in the number formats of engine and trainer, and in the
correction. FP8 is emulated, and `bf16` has no number format. Rewards are means over seeds with 95 % t-intervals. "Minus bf16" is the mean
difference between the last tenth of the steps and that of `bf16` with the same seed. A seed counts as collapsed if the reward of its last
tenth is below half of that of its best tenth.

**No arm collapsed, and the differences between the arms are not significant.** With the plain FP8 rollout the median KL divergence is 40
times that of `bf16`, and the final mean reward is the lowest, but its interval contains all other means. With `true_on_policy` the gap is 0
in every step, and the reward is similar to that of the other arms. `r3` and `r3+tis` reduce the largest gap of a step to a quarter or
less. At this size, learning rate and number of steps, three seeds show no benefit of a gap of exactly 0. In short trials with a higher
learning rate, `bf16` was unstable too. FP8 on both sides (`unified`) has fewer steps. The next section describes a setting in which only
FP8 is unstable.

![Reward and KL divergence of each arm, with 95 % intervals; dashed: bf16](collapse.png)
"""
SEARCH = """\
### Where only FP8 is unstable

The first experiment found no learning rate at which only FP8 is unstable. A search over thirteen harder settings found one
([decision 12](decisions/0012-exact-log-probs.md)): `--layers 8 --hidden 64 --experts 32 --length 24 --sft-steps 400 --sft-batch 64 --adam-eps
1e-3 --prompts 64 --lr 0.0018 --updates 4`.

The experiment trains the arms in the chosen setting with three seeds that the search did not use, because the search favours a setting with
a bad seed of `plain`. All runs are compared over the same number of steps. The intervals are not corrected for multiple comparisons.

**In this setting the gap causes collapses, and some corrections prevent them.** With the plain FP8 rollout all three seeds collapse. No
seed collapses with `bf16`, `r3+tis`, `unified` (FP8 on both sides) or `true_on_policy` (FP8 on both sides with a gap of 0 in every step).
With `tis` alone and with `r3` alone, one of three seeds collapses, and later. At this learning rate `bf16` varies so much between seeds
that its difference from `plain` is not significant with three seeds. In an earlier run of the same setting, without the two arms of `r3`
and 9 rollouts shorter, two seeds collapsed with `tis` and one with `unified` (`collapse-2026-11-27-gpu-search-five.json`): training in BF16
on a GPU is not deterministic, so a seed close to the limit can have either outcome.

![Reward and KL divergence of each arm in the chosen setting, with 95 % intervals; dashed: bf16](collapse-search.png)
"""


def read(part: str) -> dict[str, Any]:
    """Return the newest result file of a part, such as ``families-gpu``."""
    found = sorted(RESULTS.glob(f"true_on_policy-????-??-??-{part}.json"))[-1]
    return {"file": found.name, **json.loads(found.read_text(encoding="utf-8"))}


def row(name: str, sides: list[Any]) -> str:
    """Return a line of a table: without and with the plugin for each side and dtype, or the reason of a refusal."""
    refused = next((side for side in sides if isinstance(side, str)), None)
    if refused is not None:
        return f"| {name} | refused: {refused} | | | | |"
    cells = [f"{plain:.1g}" for side in sides for plain, _ in side.values()]
    exact = [f"{with_plugin:.2g}" for side in sides for _, with_plugin in side.values()]
    return f"| {name} | {' | '.join(cells)} | {', '.join(sorted(set(exact)))} |"


def table(first: str, part: str, pick: Any) -> list[str]:
    """Return a table of one part on both devices, and its sources. ``pick`` flattens a result to name -> dtype -> gaps."""
    cpu, gpu = read(part), read(f"{part}-gpu")
    sides = [pick(cpu[part]), pick(gpu[part])]
    lines = [f"| {first} | CPU, FP32 | CPU, BF16 | H100, FP32 | H100, BF16 | all four with the plugin |"]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    lines += [row(name, [side[name] for side in sides]) for name in sides[0] if name in sides[1]]
    sources = " and ".join(f"`{each['file']}` (commit {each['commit']})" for each in (cpu, gpu))
    return [*lines, "", f"Results: {sources}."]


def by_format(found: dict[str, Any]) -> dict[str, Any]:
    """Return "family, format" -> dtype -> gaps."""
    return {f"{family}, `{name}`": gaps for family, formats in found.items() for name, gaps in formats.items()}


def newest(pattern: str) -> dict[str, Any] | None:
    """Return the newest result file of a pattern; None if there is none."""
    found = sorted(RESULTS.glob(pattern))
    return {"file": found[-1].name, **json.loads(found[-1].read_text(encoding="utf-8"))} if found else None


def native() -> list[str]:
    """Return a table of native FP8 products; nothing if they were not measured."""
    found = newest("true_on_policy-????-??-??-native-gpu.json")
    if found is None:
        return []
    lines = ["| native FP8 products, BF16, H100 | without | with the plugin and `--fp8-fixed-order` |", "|---|--:|--:|"]
    for family, row in found["native"].items():
        plain, exact = row["bfloat16"]
        lines.append(f"| {family} | {plain:.1g} | {exact:.2g} |")
    return [*lines, "", f"Results: `{found['file']}` (commit {found['commit']}).", ""]


def times() -> list[str]:
    """Return the section of step times on a GPU; nothing if they were not measured."""
    found = newest("true_on_policy-????-??-??-time-gpu.json")
    if found is None:
        return []
    lines = [
        "| model | pairs | step without, s | step with, s | ratio | interval | rollout | training | largest mean gap without | with |",
        "|---|" + "--:|" * 9,
    ]
    for model, row in found["time"].items():
        plain, exact = row["sides"]["plain"], row["sides"]["exact"]
        low, high = row["ratio_median_interval"]
        cells = [
            f"{plain['seconds']:.2f}",
            f"{exact['seconds']:.2f}",
            f"{row['ratio_median']:.2f}",
            f"{low:.2f} to {high:.2f}",
        ]
        cells += [f"{exact[part] / plain[part]:.2f}" for part in ("rollout", "train")]
        cells += [f"{row['largest_gap'][side]:.2g}" for side in ("plain", "exact")]
        lines.append(f"| {model} | {row['turns']} | {' | '.join(cells)} |")
    return [*lines, "", f"Results: `{found['file']}` (commit {found['commit']}).", ""]


def sglang(model: str) -> list[str]:
    """Return the section of SGLang's gap for a model of the benchmark; nothing if it was not measured."""
    found = newest(f"sglang_exact-????-??-??-{model}*.json")
    if found is None:
        return [f"Not measured for `{model}`.", ""]
    columns = {
        "alone and together": "batch",
        "sampled and scored": "phase",
        "SGLang and FP32": "engine_rounding",
        "trainer and FP32": "trainer_rounding",
        "SGLang and trainer": "engine_trainer",
        "SGLang and exact trainer": "engine_exact_trainer",
    }
    lines = [f"| {model} | {' | '.join(columns)} | tokens that differ from the exact trainer |", "|---|" + "--:|" * 7]
    for variant, row in found["gaps"].items():
        if "error" in row:
            lines.append(f"| `{variant}` | did not run | | | | | | |")
            continue
        cells = [f"{row[name]['mean']:.3g}" for name in columns.values()]
        lines.append(f"| `{variant}` | {' | '.join(cells)} | {row['engine_exact_trainer']['differing']:.1%} |")
    failed = [f'`{v}` did not run: "{row["error"]}".' for v, row in found["gaps"].items() if "error" in row]
    lines += [text for line in failed for text in ("", line)]
    return [*lines, "", *megatron(model, found["gaps"]), f"Results: `{found['file']}` (commit {found['commit']}).", ""]


def megatron(model: str, gaps: dict[str, Any]) -> list[str]:
    """Return the table of the Megatron trainer on the same tokens; a sentence if it was not measured."""
    rows = {variant: row for variant, row in gaps.items() if "engine_megatron" in row}
    if not rows:
        return [f"The Megatron trainer was not measured for `{model}`.", ""]
    columns = {
        "SGLang and Megatron": "engine_megatron",
        "Megatron and FP32": "megatron_rounding",
        "Megatron and exact trainer": "megatron_exact_trainer",
    }
    lines = [f"| {model}, Megatron trainer | {' | '.join(columns)} |", "|---|" + "--:|" * 3]
    for variant, row in rows.items():
        cells = [f"{row[name]['mean']:.3g}" for name in columns.values()]
        lines.append(f"| `{variant}` | {' | '.join(cells)} |")
    return [*lines, ""]


def collapse(pattern: str = "collapse-????-??-??-cpu.json") -> list[str]:
    """Return the table of the training curves in a result file; nothing if they were not measured."""
    found = newest(pattern)
    if found is None:
        return []
    lines = [
        "| learning rate | arm | steps of each seed | reward of the last tenth | best tenth | minus bf16 | seeds that collapsed "
        "| median KL | largest mean gap of a step |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for lr, table in found["learning_rates"].items():
        for arm, row in table.items():
            pairs = row["reward_last"], row["reward_best"], row["minus_bf16"]
            ends = [
                "-" if pair is None else f"{pair[0]:.3f}" + ("" if pair[1] is None else f" ± {pair[1]:.3f}")
                for pair in pairs
            ]
            cells = [
                ", ".join(map(str, row["steps"])),
                *ends,
                str(row["collapsed"]),
                f"{row['kl_median']:.2g}",
                f"{row['gap_largest']:.2g}",
            ]
            lines.append(f"| {lr} | `{arm}` | {' | '.join(cells)} |")
    if not found["complete"]:
        lines += ["", "Not all runs are complete: compare arms with equal steps only."]
    return [*lines, "", f"Results: `{found['file']}` (commit {found['commit']}).", ""]


def differences(table: dict[str, Any]) -> str:
    """Return the sentences about arms whose difference from ``bf16`` has an interval without 0, and about seeds that collapsed."""
    below, above = list[str](), list[str]()
    for arm, row in table.items():
        mean, half = row["minus_bf16"] or (0.0, None)
        if half is not None and abs(mean) > half:
            (below if mean < 0 else above).append(f"`{arm}`")
    fallen = [
        f"{row['collapsed']} of {len(row['steps'])} with `{arm}`" for arm, row in table.items() if row["collapsed"]
    ]
    sentences = [f"The interval of the difference from `bf16` is below 0 for {', '.join(below) or 'no arm'}"]
    sentences += [
        f"and above 0 for {', '.join(above) or 'no arm'}. Seeds that collapsed: {', '.join(fallen) or 'none'}."
    ]
    return " ".join(sentences)


def search() -> list[str]:
    """Return the section of the experiment in the setting in which only FP8 is unstable; nothing if it was not run."""
    experiment = newest("collapse-????-??-??-*search.json")
    if experiment is None:
        return []
    table = next(iter(experiment["learning_rates"].values()))
    return [SEARCH, differences(table), "", *collapse(experiment["file"])]


def render() -> str:
    """Return the page."""
    families = table("family", "families", dict)
    formats = table("family and format", "formats", by_format)
    heading = "## Number formats\n\nEngine and trainer compute in the format, emulated; the mean of |Δ log p| over the tokens of a step."
    lines = [INTRODUCTION, "## Model families", "", *families, "", heading, "", *formats, "", *native()]
    seconds = times()
    if seconds:
        lines += [TIMES, *seconds]
    lines += [SGLANG, *sglang("dense"), *sglang("moe"), SWITCHES, PARTIAL]
    curves = collapse()
    lines += [COLLAPSE, *curves] if curves else [UNKNOWN]
    lines += search()
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
