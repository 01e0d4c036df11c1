"""Is an engine that computes something else found before anything is trained, and is a sound one let pass?

Defects (``miles_embedded.testing``: ``defects``, ``more_defects``, ``decode_defects``) are planted, one at a time, into the embedded engine,
in float32, bfloat16, FP8 and INT4, and into a double of SGLang whose schedulers hold a real small model; the trainer is sound. Reported is
what stopped the run. Then sound runs: every family of the tests with several seeds in float32 and bfloat16, every pair of number formats,
experts without normalized top-k and large weights, every schedule; reported are the errors of both sides, the time of the check, and the
runs that were stopped. The exit code is 1 when a defect passed in float32 or a sound run was stopped: in lower precision some
defects are smaller than rounding.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure import ROOT, finish, installed, options

sys.path.insert(0, str(ROOT / "plugins/sglang/tests"))

import sglang_double
import sglang_scheduler_double

import miles_sglang
from miles_core.config.load import load
from miles_core.errors import MilesError, PlanError
from miles_core.mismatch import first_sync
from miles_core.run.make import make_run
from miles_core.run.parts import build_parts
from miles_core.run.prepare import apply_plan, prepare
from miles_embedded.engine import build as engine_build
from miles_embedded.testing.decode_defects import GENERATING
from miles_embedded.testing.defects import Defect, planted
from miles_embedded.testing.families import FAMILIES, lacking
from miles_embedded.testing.more_defects import INVISIBLE, MODELS
from miles_sglang import build as sglang_build
from miles_testing import tiny, toy_run
from miles_testing.toy import toy_arguments

FORMATS = ("fp8", "mxfp8", "int4", "nvfp4")
#: Families whose models the double of SGLang's schedulers holds.
DOUBLED = ("llama", "qwen3", "qwen3_moe")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "moe_intermediate_size": 128}
#: Defects that the update itself finds, and only where the model has an output layer of its own.
BY_UPDATE = ("untied head",)
SEEDS = (0, 1)


@contextmanager
def double(make: Callable[[Path], Any] = sglang_scheduler_double.SchedulerModel) -> Iterator[None]:
    """Start, instead of SGLang, a double with the model that is made here."""
    with pytest.MonkeyPatch.context() as patch:
        sglang_double.stand_in_for_sglang(patch)
        patch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, packages=()))

        def link(arguments: Mapping[str, Any], *_: Any, **__: Any) -> Any:
            return sglang_scheduler_double.SchedulerLink(make, Path(arguments["model_path"]), arguments)

        patch.setattr(sglang_build, "ProcessLink", link)
        yield


def start(plugins: Sequence[str] = (), **flags: Any) -> None:
    """Build the parts of a toy run, sync once, and compare both sides as a run does before its first step."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(toy_arguments(plugins, Path(folder) / "run", **flags))
        plan, catalogue = prepare(config)
        run = make_run(apply_plan(config, plan), plan, catalogue, Path(folder))

        async def compare() -> None:
            async with build_parts(run) as (parts,):
                run.policy.version = (await parts.learner.push(0)).version
                await first_sync.FirstSync(run)(parts)

        asyncio.run(compare())


def own_head(checkpoint: Path) -> Any:
    return sglang_scheduler_double.SchedulerModel(checkpoint, own_head=True, takes_head=False)


def stopped_by(engine: str, defect: Defect, sizes: Mapping[str, Any] | None = None, **flags: Any) -> str:
    """The beginning of the sentence that stopped a run with a defect; empty where it was not stopped.

    Raises:
        PlanError: the run was refused before an engine was built, so the defect was not tried.
    """
    by_update = defect.name in BY_UPDATE
    made: Any = nullcontext()
    if engine == "sglang":
        flags = {"engine": "sglang", "device": "cpu", **flags}
        made = double(own_head) if by_update else double()
    with tempfile.TemporaryDirectory() as folder, made:
        checkpoint = defect.checkpoint(Path(folder) / "model", **(sizes or {}))
        try:
            with nullcontext() if by_update and engine == "sglang" else planted(defect):
                # what an update has to reach is checked by the run
                begin = partial(toy_run, steps=0, self_check=True) if by_update else start
                begin(hf_checkpoint=checkpoint, **defect.options, **flags)
        except PlanError:
            raise
        except MilesError as error:
            return str(error)
    return ""


def settings() -> Iterator[tuple[str, str, dict[str, Any], Callable[[Defect], bool]]]:
    """Yield label, engine, arguments of ``stopped_by``, and the defects to try."""
    yield "embedded, float32", "embedded", {"dtype": "float32"}, lambda defect: True
    yield "embedded, bfloat16", "embedded", {"dtype": "bfloat16"}, lambda defect: True
    for format in ("fp8", "int4"):
        flags = {
            "plugins": [format],
            "rollout_precision": format,
            "emulate_precision": True,
            "dtype": "bfloat16",
            "sizes": SIZES,
        }
        yield f"embedded, {format}", "embedded", flags, lambda defect: defect.family in DOUBLED
    yield "sglang, float32", "sglang", {}, lambda defect: defect.family in DOUBLED


def sound(**flags: Any) -> dict[str, Any]:
    """A sound run: the errors of both sides, the time of the check, and the sentence that stopped it."""
    errors: list[str] = []
    seconds: list[float] = []
    judge, call = first_sync.FirstSync._judge, first_sync.FirstSync.__call__

    def watched(self: Any, parts: Any, scorer: Any, found: Any) -> None:
        errors.append(f"{found.what}: {found.errors}")
        judge(self, parts, scorer, found)

    async def timed(self: Any, parts: Any) -> Any:
        start = time.process_time()
        try:
            return await call(self, parts)
        finally:
            seconds.append(time.process_time() - start)

    stopped = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_sync.FirstSync, "_judge", watched)
        patch.setattr(first_sync.FirstSync, "__call__", timed)
        try:
            toy_run(self_check=True, **flags) if "schedule" in flags else start(**flags)
        except PlanError:
            return {"refused": True}
        except MilesError as error:
            stopped = str(error)[:240]
    return {"errors": errors, "seconds": round(sum(seconds), 3), "stopped": stopped}


def sound_runs() -> Iterator[tuple[str, dict[str, Any]]]:
    import transformers

    changes: list[tuple[str, Mapping[str, Any]]] = [(family, {}) for family in FAMILIES if not lacking(family)]
    changes += [("qwen3_moe", {"norm_topk_prob": False})]
    for seed in SEEDS:
        for family, change in changes:
            name, values = FAMILIES[family]
            config = getattr(transformers, name)(**{**values, **change})
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = tiny.random_checkpoint(config, Path(folder) / "model", seed, biases=0.3 * seed)
                for dtype in ("float32", "bfloat16"):
                    label = f"{family}{', changed' if change else ''}, seed {seed}, {dtype}"
                    yield label, sound(hf_checkpoint=checkpoint, dtype=dtype)
    for family in DOUBLED:
        with double():
            yield f"sglang, {family}, float32", sound(family=family, engine="sglang", device="cpu")
    for rollout in FORMATS:
        for train in ("bf16", rollout):
            for family in ("qwen3", "qwen3_moe"):
                precision = {"rollout_precision": rollout, "train_precision": train, "emulate_precision": True}
                for dtype in ("float32", "bfloat16"):
                    label = f"{family}, {rollout} x {train}, {dtype}"
                    yield label, sound(plugins=[rollout], family=family, sizes=SIZES, dtype=dtype, **precision)
    for cache in ("float8_e4m3fn", "float8_e5m2"):
        yield f"cache {cache}", sound(kv_cache_dtype=cache, dtype="bfloat16")
    for sampling in (
        {"rollout_temperature": 0.7},
        {"rollout_top_p": 0.8},
        {"rollout_top_k": 5},
        {"rollout_temperature": 1.3},
    ):
        yield f"{sampling}", sound(dtype="bfloat16", **sampling)
    for schedule in ("sync", "ahead", "async"):
        yield f"schedule {schedule}", sound(steps=2, schedule=schedule)


def main() -> int:
    given = options(__doc__).parse_args()
    torch.set_num_threads(given.threads)
    logging.disable(logging.CRITICAL)
    engine_build.self_check = lambda model: None  # it is judged by its own tests
    runs: dict[str, dict[str, Any]] = {}
    for label, result in sound_runs():
        if "refused" not in result:
            runs[label] = result
            print(f"{label}: {result}", flush=True)
    false = [label for label, result in runs.items() if result["stopped"]]
    slowest = max(result["seconds"] for result in runs.values())
    print(
        f"sound runs: {len(false)} of {len(runs)} stopped {false}; the check took at most {slowest:.2f} s of processor time",
        flush=True,
    )
    found: dict[str, dict[str, str]] = {}
    for label, engine, arguments, tried in settings():
        defects = [defect for defect in (*MODELS, *GENERATING) if tried(defect)]
        found[label] = {f"{d.name} ({d.family})": stopped_by(engine, d, **arguments)[:300] for d in defects}
        missed = [name for name, text in found[label].items() if not text]
        print(f"{label}: {len(defects) - len(missed)} of {len(defects)} defects found; missed: {missed}", flush=True)
    invisible = {d.name: stopped_by("embedded", d, dtype="bfloat16")[:300] for d in INVISIBLE}
    passed = [name for label in found if "float32" in label for name, text in found[label].items() if not text]
    finish(
        "planted_defects",
        {
            "found": {label: [sum(map(bool, texts.values())), len(texts)] for label, texts in found.items()},
            "defects": found,
            "below rounding": invisible,
            "sound runs": len(runs),
            "stopped": false,
            "largest seconds": slowest,
            "sound": runs,
        },
        given.save,
        lambda: installed("torch", "transformers"),
    )
    return int(bool(false or passed))


if __name__ == "__main__":
    sys.exit(main())
