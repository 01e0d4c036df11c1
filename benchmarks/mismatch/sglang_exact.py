"""How far SGLang's log-probabilities are from the embedded trainer's, by cause, and which of SGLang's switches close the gap.

A random BF16 model of ``sglang_engine.py``. Each variant is an engine in a process of its own: ``plain``; ``deterministic``
(``enable_deterministic_inference``: batch-invariant kernels); ``on_policy_target`` (also ``rl_on_policy_target=fsdp``: norms, rotary
embedding, activation and logits as in Transformers, residuals in FP32); ``transformers`` (``deterministic`` with the model's Transformers code,
``model_impl=transformers``); ``shared_kernels`` (the same with the trainer's kernels, ``miles_true_on_policy.inside_sglang``). An engine
samples 32 prompts x 64 tokens together, and scores them together and one by one. The embedded trainer scores the same tokens as it is, with
``true_on_policy``, and in FP32. ``--trainer megatron`` adds the Megatron trainer on one rank.

Mean and largest |difference| in nats, and the share of tokens that differ at all:

- ``batch``: an engine's scores alone and together (what depends on the batch);
- ``phase``: sampled and scored (decoding against a prompt);
- ``engine_rounding``, ``trainer_rounding``: each side, scored alone, against FP32;
- ``engine_trainer`` and ``engine_exact_trainer``: what a run sees, and with the trainer's batch dependence removed;
- ``engine_megatron``, ``megatron_rounding``, ``megatron_exact_trainer``: the Megatron trainer against the engine, FP32 and the exact trainer;
- ``replaced``: the modules that use the trainer's kernels.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import sglang_engine as base
from benchmarks.engine.checkpoints import VOCABULARY, make_model
from benchmarks.measure import finish, installed, options
from miles_core.data import Sample, collate
from miles_core.engine import Sampling
from miles_core.trainer import Callbacks

_DETERMINISTIC = {"enable_deterministic_inference": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": _DETERMINISTIC,
    "on_policy_target": _DETERMINISTIC | {"rl_on_policy_target": "fsdp"},
    "transformers": _DETERMINISTIC | {"model_impl": "transformers"},
    "shared_kernels": _DETERMINISTIC | {"model_impl": "transformers"},
}
#: Tokens of a response, and of an engine's cache.
TOKENS, CACHE = 64, 32768


async def sample_and_score(given: argparse.Namespace) -> dict[str, Any]:
    """Responses of one variant and their scores."""
    plain = base.server_arguments
    more = VARIANTS[given.worker] | {"mem_fraction_static": given.memory, "max_total_tokens": CACHE}
    base.server_arguments = lambda given: plain(given) | more
    engine = base.engine_for(given.checkpoint, given, given.work)
    if given.worker == "shared_kernels":
        engine.link.changes["MILES_TRUE_ON_POLICY"] = "1"
    await engine.start()
    lines = (given.work / "sglang.log").read_text(errors="replace").splitlines()
    replaced = [line for line in lines if "shared kernels: " in line]
    if bool(replaced) != (given.worker == "shared_kernels"):
        raise SystemExit("SGLang did not load the plugin of the shared kernels:\n" + "\n".join(lines[-40:]))
    asked = base.prompts(given)[::8]
    responses, _ = await base.generate(engine, asked, Sampling(TOKENS, ignore_eos=True), set())
    answers = [list(map(int, r.tokens)) for r in responses]
    whole = [p + answer for p, answer in zip(asked, answers, strict=True)]
    together = await engine.score(whole)
    alone = [(await engine.score([tokens]))[0] for tokens in whole]
    await engine.stop()
    return {
        "replaced": replaced,
        "tokens": list(zip(asked, answers, strict=True)),
        "sampled": [list(map(float, r.log_probs)) for r in responses],
        "together": [row[-TOKENS:].tolist() for row in together],
        "alone": [row[-TOKENS:].tolist() for row in alone],
    }


@torch.no_grad()
def score(trainer: Any, tokens: list[Any]) -> np.ndarray:
    """A trainer's log-probabilities [tokens]."""
    samples = [
        Sample(tokens=p + r, response_length=len(r), loss_mask=[1] * len(r), index=i, group_index=i)
        for i, (p, r) in enumerate(tokens)
    ]
    batch = collate(samples)
    found: np.ndarray = trainer.log_probs(batch, "old")["log_probs"].float().cpu()[batch.mask != 0].numpy()
    return found


def bind(trainer: Any) -> Any:
    """Let a trainer score without training."""
    trainer.bind(Callbacks(trainer.forward, lambda *_: None, trainer.optimizer_step))  # type: ignore[arg-type]
    return trainer


def compare(one: Any, two: Any) -> dict[str, float]:
    """Mean and largest |difference|, and the share of tokens that differ."""
    gap = np.abs(np.asarray(one, np.float32).ravel() - np.asarray(two, np.float32).ravel())
    return {
        "mean": float(f"{gap.mean():.3g}"),
        "max": float(f"{gap.max():.3g}"),
        "differing": round(float((gap > 0).mean()), 4),
    }


def load_trainers(checkpoint: Path, megatron: bool) -> dict[str, Any]:
    """The embedded trainer as it is, with ``true_on_policy``, and in FP32; the Megatron trainer if wanted."""
    from miles_embedded import load_model
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
    from miles_true_on_policy.hooks import make_invariant

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = {"plain": "bfloat16", "exact": "bfloat16", "wide": "float32"}
    models = {name: load_model(checkpoint, dtype, device) for name, dtype in dtypes.items()}
    make_invariant(models["exact"])
    trainers = {name: bind(EmbeddedTrainer(model, TrainerConfig(micro_batch_size=8))) for name, model in models.items()}
    return trainers | ({"megatron": load_megatron(checkpoint)} if megatron else {})


def load_megatron(checkpoint: Path) -> Any:
    """The Megatron trainer of one rank."""
    from miles_core.trainer import OptimizerConfig
    from miles_formats import Codec
    from miles_megatron import families
    from miles_megatron.sizes import Sizes
    from miles_megatron.trainer.groups import start_groups

    sizes = Sizes(ranks=1)
    world = start_groups(sizes, 0)
    from miles_megatron.trainer.settings import Settings
    from miles_megatron.trainer.trainer import MegatronTrainer

    settings = Settings(adamw=OptimizerConfig(1e-5), dtype=torch.bfloat16, micro_batch_size=8, longest=2048)
    config = families.read(json.loads((checkpoint / "config.json").read_text()))
    return bind(MegatronTrainer(config, sizes, world, checkpoint, settings, codec=Codec()))


def summarize(found: dict[str, Any], trainers: dict[str, Any]) -> dict[str, Any]:
    """All comparisons of one variant."""
    scores = {name: score(trainer, found["tokens"]) for name, trainer in trainers.items()}
    pairs = {
        "batch": (found["alone"], found["together"]),
        "phase": (found["sampled"], found["together"]),
        "engine_rounding": (found["alone"], scores["wide"]),
        "trainer_rounding": (scores["exact"], scores["wide"]),
        "engine_trainer": (found["sampled"], scores["plain"]),
        "engine_exact_trainer": (found["sampled"], scores["exact"]),
    }
    if "megatron" in scores:
        pairs["engine_megatron"] = (found["sampled"], scores["megatron"])
        pairs["megatron_rounding"] = (scores["megatron"], scores["wide"])
        pairs["megatron_exact_trainer"] = (scores["megatron"], scores["exact"])
    return {name: compare(*sides) for name, sides in pairs.items()} | {"replaced": found["replaced"]}


def run_variant(name: str, given: argparse.Namespace, checkpoint: Path, place: Path) -> dict[str, Any]:
    """Start a process for the variant; its responses, or its error."""
    work = place / name
    work.mkdir()
    command = [sys.executable, __file__, "--worker", name, "--checkpoint", str(checkpoint), "--work", str(work)]
    command += ["--model", given.model, "--memory", str(given.memory)]
    started = time.monotonic()
    with suppress(subprocess.TimeoutExpired), (work / "output.txt").open("w") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=given.limit)
    print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    result = work / "result.json"
    if not result.exists():
        return {"error": (work / "output.txt").read_text(errors="replace")[-2500:] or f"no result in {given.limit} s"}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=("dense", "moe", "tiny"), default="dense")
    parser.add_argument("--trainer", choices=("embedded", "megatron"), default="embedded", help="megatron: both")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--memory", type=float, default=0.6, help="SGLang's mem_fraction_static; its cache has 32768 tokens in any case"
    )
    parser.add_argument("--limit", type=float, default=900, help="seconds of an engine, its start included")
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    for name in ("--checkpoint", "--work"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    for name, value in (("requests", 256), ("vocabulary", VOCABULARY), ("tokens", TOKENS), ("precision", "bf16")):
        setattr(given, name, value)
    given.routes = False
    given.fp8_gemm, given.eager, given.deterministic, given.bucket = "", True, False, 512
    if given.worker:
        found = asyncio.run(sample_and_score(given))
        (given.work / "result.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_model(given.model, Path(directory) / "model")
        with ThreadPoolExecutor(len(given.variants)) as pool:
            runs = {pool.submit(run_variant, name, given, checkpoint, Path(directory)): name for name in given.variants}
            trainers, rows = load_trainers(checkpoint, given.trainer == "megatron"), {}
            for run in as_completed(runs):
                found = run.result()
                row = rows[runs[run]] = found if "error" in found else summarize(found, trainers)
                print(f"{runs[run]:<18}", row, file=sys.stderr, flush=True)
    table = {name: rows[name] for name in given.variants}
    result = {"model": given.model, "switches": {name: VARIANTS[name] for name in given.variants}, "gaps": table}
    finish(
        "sglang_exact",
        result,
        given.save,
        lambda: installed("miles-core", "torch", "transformers", "sglang"),
        given.model + ("-megatron" if given.trainer == "megatron" else ""),
    )


if __name__ == "__main__":
    main()
