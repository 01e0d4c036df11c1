"""Checkpoints of every number format in SGLang: does it load them, does it generate, and are its log-probabilities ours.

A tiny random model (Qwen3 and Qwen3-MoE, shapes that SGLang's kernels accept) is converted by ``miles convert``. SGLang, in
a process of its own (``--sglang-python``), answers 16 prompts greedily and at temperature 1. The embedded engine then scores
the same tokens, from the same files: as it emulates the format, with the weights alone in the format, with the BF16
source, and with the same format of a model from another seed.

Reported is the mean of |log p(SGLang) - log p(embedded)|. Two numbers say what it means: how large it is for the model from
another seed, and ``own_noise``, how large it is between the embedded engine in BF16 and in FP32. The exit code is 1 when
SGLang is farther from both readings of the format than a quarter of the former. A format that SGLang refuses on this machine
is reported with its sentence.

SGLang 0.5.17 compiles its Marlin kernels (INT4, and NVFP4 before sm_100) in the first request that needs them, for many
minutes; ``--build-kernels`` does it beforehand, on all cores, and says how long it took.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import finish, installed, options

#: SGLang generates from a checkpoint as we read it when it is that much nearer than an unrelated model.
NEAR = 0.25
PROMPTS, TOKENS, VOCABULARY = 16, 48, 64
#: The line by which the worker says that the checkpoint is loaded.
STARTED = "SGLang has started"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 512}
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "dense": ("qwen3", {}),
    "moe": ("qwen3_moe", {"moe_intermediate_size": 256, "num_experts": 8}),
}
#: What compiles nothing beyond what it must, and waits for what it must.
SERVER: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.2,
    "context_length": 256,
    "max_running_requests": 32,
    "random_seed": 0,
    "watchdog_timeout": 3600,
    "log_level": "info",
}


@dataclass(frozen=True)
class Case:
    """A model, the number format it is converted to, and further words for ``miles convert``."""

    family: str
    format: str
    words: str = ""

    def __str__(self) -> str:
        return " ".join(w for w in (self.family, self.format, self.words) if w)


CASES = (
    Case("dense", "bf16"),
    Case("dense", "fp8"),
    Case("dense", "int4", "--int4-group-size 128"),
    Case("dense", "int4", "--int4-group-size 64"),
    Case("dense", "int4", "--int4-group-size 32"),
    Case("dense", "mxfp8"),
    Case("moe", "bf16"),
    Case("moe", "fp8"),
    Case("moe", "fp8", "--num-layers-at-end-in-bf16 1"),
    Case("moe", "int4", "--int4-group-size 128"),
    Case("moe", "int4", "--int4-group-size 32 --int4-scope experts"),
    Case("moe", "nvfp4"),
    Case("moe", "mxfp8"),
)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--sglang-python", default=sys.executable, help="the Python that has SGLang (default: this one)"
    )
    parser.add_argument("--sglang", action="append", default=[], metavar="KEY=VALUE", help="an argument of its engine")
    parser.add_argument("--only", default="", help="cases that contain one of these words, by comma")
    parser.add_argument("--device", default="auto", help="of the embedded engine")
    parser.add_argument("--build-kernels", action="store_true", help="compile SGLang's Marlin kernels first")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one engine")
    parser.add_argument("--variant", default="", help="told apart in the result file's name")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(given.threads)
    wanted = [w for w in given.only.split(",") if w]
    cases = [case for case in CASES if not wanted or any(w in str(case) for w in wanted)]
    built = built_kernels(given) if given.build_kernels else {}
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for case in cases:
            rows.append(measure(case, Path(place), given))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    setup = {"server": server(given), "prompts": PROMPTS, "tokens": TOKENS, "kernel_build_seconds": built}
    names = ("torch", "transformers", "miles-core")
    finish("sglang_interop", {**setup, "cases": rows}, given.save, lambda: installed(*names), given.variant)
    if far := [row["case"] for row in rows if row.get("near") is False]:
        sys.exit(f"SGLang generates from other numbers than the embedded engine: {', '.join(far)}")
    if failed := [row["case"] for row in rows if "failed" in row]:
        sys.exit(f"SGLang started and did not answer: {', '.join(failed)}")


def server(given: Any) -> dict[str, Any]:
    """The engine's arguments, without the checkpoint: ``SERVER`` and what the command line says."""
    more = dict(word.split("=", 1) for word in given.sglang)
    return SERVER | {key: literal(value) for key, value in more.items()}


def literal(text: str) -> Any:
    """``text`` as JSON where it is (``true``, ``0.5``), else as it is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def built_kernels(given: Any) -> dict[str, float]:
    """Seconds of compiling each kernel module, all at the same time."""
    split = {"NVCC_APPEND_FLAGS": "--split-compile=0 -Xptxas=--split-compile=0"}
    names = ("gptq_marlin", "moe_wna16_marlin")
    command = [given.sglang_python, str(Path(__file__).with_name("sglang_worker.py")), "--build"]
    running = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True, env=os.environ | split)
        for name in names
    }
    said = {name: process.communicate()[0] for name, process in running.items()}
    if failed := [name for name in names if running[name].returncode]:
        sys.exit(f"SGLang's kernels did not compile: {', '.join(failed)}; see above")
    seconds = {name: float(text.split()[-1]) for name, text in said.items()}
    print(f"compiled {seconds}", file=sys.stderr, flush=True)
    return seconds


def measure(case: Case, place: Path, given: Any) -> dict[str, Any]:
    """One row of the result."""
    source, other, stored, stored_other = (
        checkpoint(case, place, seed, form) for form in (False, True) for seed in (0, 1)
    )
    said = ask_sglang(stored, place, given)
    if "refused" in said or "failed" in said:
        return {"case": str(case), **said}
    numbers = {name: said[name] for name in said if name not in ("prompts", "greedy", "sampled")}
    row: dict[str, Any] = {"case": str(case), "stored_bytes": stored_bytes(stored), **numbers}
    readings = {
        "emulated": (stored, True),
        "weights_only": (stored, False),
        "bf16_source": (source, False),
        "other_model": (stored_other if case.format != "bf16" else other, True),
    }
    scored = {name: embedded(case, path, rounds, said, given) for name, (path, rounds) in readings.items()}
    for kind in ("greedy", "sampled"):
        row[kind] = {name: distance(said[kind], found[kind]) for name, found in scored.items()}
    row["greedy"]["tokens_equal_to_emulated"] = common(said["greedy"], scored["emulated"]["generated"])
    row["greedy"]["tokens_equal_to_other_model"] = common(said["greedy"], scored["other_model"]["generated"])
    means = {name: row["sampled"][name]["mean"] for name in readings}
    row["of_other_model"] = {n: round(means[n] / means["other_model"], 4) for n in readings if n != "other_model"}
    row["own_noise"] = own_noise(case, stored, given)
    row["near"] = min(means["emulated"], means["weights_only"]) < NEAR * means["other_model"]
    return row


def checkpoint(case: Case, place: Path, seed: int, converted: bool) -> Path:
    """The BF16 checkpoint of a seed, or its conversion; made where it is not there yet."""
    from miles_core.cli.main import main as miles
    from miles_testing.tiny import tiny_checkpoint

    source = place / f"{case.family}-{seed}"
    if not source.exists():
        family, sizes = FAMILIES[case.family]
        tiny_checkpoint(family, source, seed, **SIZES, **sizes, vocab_size=VOCABULARY, dtype="bfloat16")
    if not converted or case.format == "bf16":
        return source
    target = place / f"{case}-{seed}".replace(" ", "_")
    words = ["convert", "--to", case.format, "--model-dir", str(source), "--save-dir", str(target), *case.words.split()]
    with redirect_stdout(sys.stderr):
        if not target.exists() and miles(words):
            sys.exit(f"miles {' '.join(words)} failed; see above")
    return target


def prompts() -> list[list[int]]:
    """Random token ids, 8 to 24 of them each, the same every time."""
    random = np.random.default_rng(0)
    return [random.integers(2, VOCABULARY, random.integers(8, 25)).tolist() for _ in range(PROMPTS)]


def ask_sglang(path: Path, place: Path, given: Any) -> dict[str, Any]:
    """What SGLang answered from ``path``, or ``refused`` with the last error it logged."""
    job = {"options": {"model_path": str(path), **server(given)}, "prompts": prompts(), "tokens": TOKENS}
    (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
    answer, log = place / "answer.json", place / "sglang.log"
    answer.unlink(missing_ok=True)
    command = [given.sglang_python, Path(__file__).with_name("sglang_worker.py"), place / "job.json", answer]
    print(f"SGLang: {path.name}", file=sys.stderr, flush=True)
    with log.open("w") as out, suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdout=out, stderr=out, timeout=given.timeout, check=False)
    if answer.exists():
        return {"prompts": prompts(), **json.loads(answer.read_text(encoding="utf-8"))}
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(lines[-60:]), file=sys.stderr)
    return {"failed" if STARTED in lines else "refused": why(lines)}


def why(lines: list[str]) -> str:
    """The scheduler's own error of a log, or what stands last in it."""
    first = next((i for i, line in enumerate(lines) if "Scheduler hit an exception" in line), 0)
    errors = [line for line in lines[first:] if line.partition(":")[0].endswith(("Error", "Exception"))]
    return (errors or lines or ["nothing was logged"])[0 if errors else -1]


def embedded(case: Case, path: Path, rounds: bool, said: dict[str, Any], given: Any) -> dict[str, Any]:
    """The embedded engine's log-probabilities of SGLang's tokens, and its own greedy tokens."""
    return asyncio.run(replies(engine_for(case, path, rounds, given), said))


def engine_for(case: Case, path: Path, rounds: bool, given: Any, dtype: str = "bfloat16") -> Any:
    """An embedded engine with the weights in ``path``.

    ``rounds``: inputs of quantised matrices are rounded where the format says so."""
    from miles_core.config.load import load
    from miles_core.precision.codec import Codec
    from miles_embedded.engine.engine import EmbeddedEngine
    from miles_embedded.engine.settings import Settings
    from miles_embedded.model.load import load_model, resolve_device
    from miles_formats.convert.installed import format_class
    from miles_formats.options import codec_for

    codec = Codec()
    if rounds and case.format != "bf16":
        config = load(["--rollout-precision", case.format, *case.words.split()])
        codec = codec_for(format_class(case.format), config, str(path))
    model = load_model(path, dtype, resolve_device(given.device))
    return EmbeddedEngine(model, Settings(detokenize=lambda tokens: "", codec=codec))


def own_noise(case: Case, path: Path, given: Any) -> float:
    """What BF16 arithmetic alone does: the mean |difference| between the emulation in BF16 and in FP32, over tokens that
    the first sampled. Two correct implementations of the format in BF16 can be this far apart."""
    from miles_core.contracts.engine import Request, Sampling

    async def score_texts() -> float:
        low, high = (engine_for(case, path, True, given, dtype) for dtype in ("bfloat16", "float32"))
        await low.start()
        await high.start()
        how = Sampling(max_new_tokens=TOKENS, ignore_eos=True)
        requests = [Request(prompt, how, key=i) for i, prompt in enumerate(prompts())]
        made = await asyncio.gather(*(low.generate(request) for request in requests))
        whole = [request.tokens + response.tokens for request, response in zip(requests, made, strict=True)]
        a, b = await low.score(whole), await high.score(whole)
        return float(np.concatenate([np.abs(x - y)[-TOKENS:] for x, y in zip(a, b, strict=True)]).mean())

    return round(asyncio.run(score_texts()), 5)


async def replies(engine: Any, said: dict[str, Any]) -> dict[str, Any]:
    """See ``embedded``."""
    from miles_core.contracts.engine import Request, Sampling

    await engine.start()
    found: dict[str, Any] = {}
    for kind in ("greedy", "sampled"):
        responses = [r["tokens"] for r in said[kind]]
        scored = await engine.score([p + r for p, r in zip(said["prompts"], responses, strict=True)])
        found[kind] = [s[-len(r) :] for s, r in zip(scored, responses, strict=True)]
    greedy = Sampling(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    own = await asyncio.gather(*(engine.generate(Request(p, greedy)) for p in said["prompts"]))
    await engine.stop()
    return {**found, "generated": [r.tokens for r in own]}


def distance(theirs: list[dict[str, Any]], ours: list[np.ndarray]) -> dict[str, float]:
    """|difference| of the log-probabilities of the same tokens, in nats."""
    gaps = np.concatenate([np.abs(np.asarray(t["log_probs"]) - o) for t, o in zip(theirs, ours, strict=True)])
    return {
        "mean": round(float(gaps.mean()), 5),
        "median": round(float(np.median(gaps)), 5),
        "max": round(float(gaps.max()), 4),
    }


def common(theirs: list[dict[str, Any]], ours: list[list[int]]) -> float:
    """The fraction of greedy tokens before the first difference of each response."""
    equal = 0
    for t, o in zip(theirs, ours, strict=True):
        same = np.asarray(t["tokens"]) == np.asarray(o)
        equal += len(same) if same.all() else int(same.argmin())
    return round(equal / (TOKENS * len(ours)), 4)


def stored_bytes(path: Path) -> int:
    """Of the weight files."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


if __name__ == "__main__":
    main()
