"""Whole runs on SGLang whose policy moved away from its draft: without drafts, with the draft left as it is, and with one that is trained and
travels with the weights.

The model is a small GLM-4.5 with an MTP layer (SGLang takes that from few families) that learned one synthetic language, and then its policy
another one. The runs then hardly change the policy, so acceptance changes with the draft alone. Sides:

- ``plain``, ``frozen`` and ``trained``: see above; medians of the last steps, acceptance of each step.
- ``megatron``: trained by Megatron-Core, in its policy's backward pass alone.
- ``asleep``: a Qwen3 drafts for itself as a separate draft model, and gives its memory to the trainer in every step: what comes back from the copy
  that ``--sglang-enable-draft-weights-cpu-backup`` keeps must draft as before.

- ``head-frozen`` and ``head``: an EAGLE head of its own drafts for a Qwen3; it begins untrained, and learns from the policy's distribution or not.

``--engine embedded`` makes all but ``megatron`` and ``asleep`` with the embedded engine. One JSON line a side as soon as it is known, and all at
the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import word_tokenizer
from benchmarks.engine.drafting_model import pretrained, random_checkpoint, train
from benchmarks.engine.languages import Language
from benchmarks.measure import commit, finish, installed, options
from benchmarks.scale import checkout
from miles_embedded import export_checkpoint, load_model
from miles_speculative.head import attach

#: What a run is rewarded for does not matter, but groups must differ.
REWARD = """
async def rm(args, sample):
    return sum(t % 2 for t in sample.tokens[-32:]) / 32
"""
TRAINED = "--online-sft-interval 1 --enable-mtp-training --draft-lr 1e-3"
HEAD = "--sglang-speculative-algorithm EAGLE"
#: Sides whose policy is a Qwen3, which has no MTP layer.
OWN_DRAFTS = ("asleep", "head", "head-frozen")
SIDES_BY_DEFAULT = "plain,trained,frozen"
#: engine, side -> plugins and flags
SIDES = {
    ("sglang", "plain"): ("tis", ""),
    ("sglang", "frozen"): ("tis", "--sglang-speculative-algorithm NEXTN"),
    ("sglang", "trained"): ("tis speculative", f"--sglang-speculative-algorithm NEXTN {TRAINED}"),
    ("sglang", "megatron"): (
        "tis speculative",
        "--sglang-speculative-algorithm NEXTN --trainer megatron --enable-mtp-training --draft-lr 1e-3",
    ),
    ("sglang", "asleep"): (
        "tis",
        "--sglang-speculative-algorithm STANDALONE --colocate --sglang-enable-draft-weights-cpu-backup",
    ),
    ("sglang", "head-frozen"): ("tis", HEAD),
    ("sglang", "head"): ("tis speculative", f"{HEAD} --online-sft-interval 1 --draft-lr 1e-3"),
    ("embedded", "plain"): ("tis", ""),
    ("embedded", "frozen"): ("tis speculative", "--spec-lookahead {k}"),
    ("embedded", "trained"): ("tis speculative", "--spec-lookahead {k} " + TRAINED),
    ("embedded", "head-frozen"): ("tis speculative", "--spec-lookahead {k}"),
    ("embedded", "head"): ("tis speculative", "--spec-lookahead {k} --online-sft-interval 1 --draft-lr 1e-3"),
}


def main() -> None:
    """Run what the arguments ask for."""
    given = parse()
    given.started = time.monotonic()
    torch.manual_seed(0)
    result: dict[str, Any] = {"commit": commit(), "lookahead": given.lookahead}
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "metadata").mkdir()
        libraries = ["sglang"] if given.engine == "sglang" else []
        checkout.register(Path(scratch) / "metadata", ["sglang", "speculative", "tis", "megatron"], libraries)
        result |= make(given, Path(scratch))
        say(given, **result)
        with ThreadPoolExecutor(given.jobs) as pool:
            runs = {side: pool.submit(measure, given, side, Path(scratch)) for side in given.sides.split(",")}
            for side, run in runs.items():
                result[side] = run.result()
                say(given, side=side, **result[side])
    packages = ["torch", "transformers", *(["sglang"] if given.engine == "sglang" else [])]
    sides = [] if given.sides == SIDES_BY_DEFAULT else given.sides.split(",")
    finish("sglang_drafts", result, given.save, lambda: installed(*packages), "-".join([given.engine, *sides]))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__)
    for name, default in (
        ("layers", 8),
        ("hidden", 1024),
        ("vocab", 32000),
        ("pretrain", 300),
        ("move", 40),
        ("train-rows", 32),
        ("prompts", 16),
        ("tokens", 128),
        ("steps", 4),
        ("trained-steps", 10),
        ("lookahead", 2),
        ("graphs", 128),
        ("jobs", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sides", default=SIDES_BY_DEFAULT)
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--draft-lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.set_defaults(checkpoint=None, state=None)
    return parser.parse_args()


def own_draft(given: argparse.Namespace) -> bool:
    """Whether the sides draft with a model or a head of its own."""
    return all(side in OWN_DRAFTS for side in given.sides.split(","))


def say(given: argparse.Namespace, **what: Any) -> None:
    """Each result as soon as it is there, as one JSON line: a time limit may cut the rest."""
    print(json.dumps({**what, "after": round(time.monotonic() - given.started)}), file=sys.stderr, flush=True)


def make(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The checkpoint ``scratch/model``: a draft that knows one language, and a policy that knows another. Losses of both."""
    made = random_checkpoint(configuration(given), word_tokenizer(given.vocab), scratch)
    model = load_model(made, given.dtype, given.device)
    head, before, now = attach(model, made), Language(given.vocab, seed=1), Language(given.vocab, seed=2)
    found = {"pretrain": pretrained(model, head, before, given)}
    train(model, head, now, given.move, given, policy=True, draft=False)
    if own_draft(given):  # a draft model of its own has no MTP layer
        learned, model = model.state_dict(), load_model(scratch / "plain", given.dtype, given.device)
        model.load_state_dict({name: learned[name] for name in model.state_dict()})
    export_checkpoint(model, word_tokenizer(given.vocab), scratch / "model")
    if own_draft(given) and given.sides != "asleep":
        words = ["--eagle-num-layers", "1", "--model-dir", str(scratch / "model"), "--save-dir", str(scratch / "head")]
        subprocess.run([sys.executable, "-m", "miles_core.cli.main", "convert", *words], stdout=sys.stderr, check=True)
    rows = [
        {"prompt": " ".join(f"w{t}" for t in row), "label": ""} for row in now.batch(given.prompts * 16, 16).tolist()
    ]
    (scratch / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (scratch / "reward.py").write_text(REWARD)
    return {**found, "parameters": sum(p.numel() for p in model.parameters())}


def configuration(given: argparse.Namespace) -> Any:
    """Of a small GLM-4.5, or of the Qwen3 that drafts for itself."""
    import transformers

    sizes = {
        "vocab_size": given.vocab,
        "hidden_size": given.hidden,
        "intermediate_size": 2 * given.hidden,
        "num_hidden_layers": given.layers,
        "num_attention_heads": max(given.hidden // 64, 2),
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if own_draft(given):
        return transformers.Qwen3Config(**sizes)
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": given.hidden // 2}
    return transformers.Glm4MoeConfig(
        **sizes, **experts, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1
    )


def flags_of(given: argparse.Namespace, side: str, scratch: Path) -> list[str]:
    """Of one run."""
    plugins, own = SIDES[given.engine, side]
    rows, steps = given.prompts * 8, given.trained_steps if side in ("trained", "megatron", "head") else given.steps
    flags = f"""--hf-checkpoint {scratch / "model"} --save {scratch / side} --save-interval {steps} --engine {given.engine}
        --device {given.device} --prompt-data {scratch / "prompts.jsonl"} --input-key prompt --label-key label
        --custom-rm-path {scratch / "reward.py"}:rm --rollout-batch-size {given.prompts} --n-samples-per-prompt 8
        --rollout-max-response-len {given.tokens} --num-rollout {steps} --lr 1e-7 --max-running-requests {rows}
        --use-dynamic-batch-size --max-tokens-per-gpu 16384 --seed 0 --rollout-max-context-len {given.tokens + 32}
        --verify-logprobs --plugins {",".join(plugins.split())} {own.format(k=given.lookahead)}"""
    if given.engine == "sglang":
        flags += " --sglang-disable-shared-experts-fusion"
        if given.device == "cuda":
            flags += f""" --sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-moe-runner-backend triton
                --sglang-disable-prefill-cuda-graph --sglang-cuda-graph-bs-decode {given.graphs}
                --sglang-mem-fraction-static 0.6 --sglang-max-total-tokens {rows * (given.tokens + 64)}"""
        else:
            flags += " --sglang-max-total-tokens 8192"
        if side != "plain":
            flags += f""" --sglang-speculative-num-steps {given.lookahead} --sglang-speculative-eagle-topk 1
                --sglang-speculative-num-draft-tokens {given.lookahead + 1}"""
        if side in OWN_DRAFTS:
            flags += f" --sglang-speculative-draft-model-path {scratch / ('model' if side == 'asleep' else 'head')}"
    elif side in OWN_DRAFTS:
        flags += f" --draft-model-path {scratch / 'head'}"
    return flags.split()


def measure(given: argparse.Namespace, side: str, scratch: Path) -> dict[str, Any]:
    """What the run's steps said."""
    command = [sys.executable, "-m", "miles_core.cli.main", "train", *flags_of(given, side, scratch)]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    log, path = scratch / side / "sglang" / "sglang.log", scratch / side / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if done.returncode and log.exists():
        print(log.read_text()[-4000:], file=sys.stderr)
    kind = "speculative" if given.engine == "embedded" else "engine"
    shown = (f"{kind}/accept_rate", f"{kind}/accept_length", "train/draft_kl", "train/mtp", "mismatch/abs_log_prob")
    series = {name: [round(s[name], 5) for s in steps if name in s] for name in shown}
    late = steps[len(steps) // 2 :]
    medians = ("rollout/tokens_per_second", "time/rollout", "time/sync", "time/train", "sync/bytes")
    return {
        "exit": done.returncode,
        "steps": len(steps),
        **{name: values for name, values in series.items() if values},
        **{n: round(statistics.median(s[n] for s in late), 4) for n in medians if late and n in late[0]},
    }


if __name__ == "__main__":
    main()
