"""Is an engine that computes something else found before anything is trained, and is a sound one let pass?

Twelve defects (``miles_embedded.testing.defects``) are planted, one at a time, into the embedded engine and into a double of SGLang whose
schedulers hold a real small model; the trainer is sound. Each run has the checks that are on by default. Reported is what stopped
it. Then sound runs: every family of the tests in float32 and bfloat16, every pair of number formats, every schedule; reported is the
largest share of a limit that a statistic reached, and the runs that were stopped. The exit code is 1 when a defect passed or a sound run
was stopped.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import ROOT, finish, installed, options

sys.path.insert(0, str(ROOT / "plugins/sglang/tests"))

import sglang_double
import sglang_scheduler_double

import miles_sglang
from miles_core.errors import MilesError, PlanError
from miles_embedded.engine import build as engine_build
from miles_embedded.testing.defects import DEFECTS, Defect
from miles_embedded.testing.families import FAMILIES, family_checkpoint, lacking
from miles_mismatch import first_sync
from miles_mismatch.allowance import allowance
from miles_sglang import build as sglang_build
from miles_testing import tiny, toy_run

FORMATS = ("fp8", "mxfp8", "int4", "nvfp4")
#: Families whose models the double of SGLang's schedulers holds.
DOUBLED = ("llama", "qwen3", "qwen3_moe")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "moe_intermediate_size": 128}


@contextmanager
def planted(defect: Defect, engine: str) -> Iterator[None]:
    """Engines that are built in this context have the defect."""
    with pytest.MonkeyPatch.context() as patch:
        if engine == "embedded":
            build_model = engine_build.build_model

            def build_with_defect(run: Any, policy: Any, role: str) -> Any:
                model = build_model(run, policy, role)
                defect.plant(model)
                return model

            patch.setattr(engine_build, "build_model", build_with_defect)
        else:
            use_double(patch, lambda checkpoint: scheduler_model(checkpoint, defect))
        yield


def use_double(patch: pytest.MonkeyPatch, make: Callable[[Path], Any]) -> None:
    """Start, instead of SGLang, a double with the model that is made here."""
    sglang_double.stand_in_for_sglang(patch)
    patch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, packages=()))

    def link(arguments: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        return sglang_scheduler_double.SchedulerLink(make, Path(arguments["model_path"]), arguments)

    patch.setattr(sglang_build, "ProcessLink", link)


def scheduler_model(checkpoint: Path, defect: Defect) -> Any:
    untied = defect.name == "untied head"
    model = sglang_scheduler_double.SchedulerModel(checkpoint, own_head=untied, takes_head=not untied)
    if not untied:
        defect.plant(model.__dict__["module"])
    return model


def stopped_by(engine: str, defect: Defect) -> str:
    """The beginning of the sentence that stopped a run with a defect; empty where it was not stopped.

    Raises:
        PlanError: the run was refused before an engine was built, so the defect was not tried.
    """
    flags = {"engine": "sglang", "device": "cpu"} if engine == "sglang" else {}
    with planted(defect, engine):
        try:
            toy_run(steps=0, self_check=True, family=defect.family, sizes=dict(defect.sizes), **flags)
        except PlanError:
            raise
        except MilesError as error:
            return str(error)
    return ""


def sound(**flags: Any) -> dict[str, Any]:
    """A sound run: the largest share of a limit that it reached, and the sentence that stopped it."""
    shares: list[float] = []
    seconds: list[float] = []
    judge, compare = first_sync.FirstSync._judge, first_sync.FirstSync._compare

    def watched(self: Any, parts: Any, worker: str, found: Any, declared: Any) -> None:
        limits = allowance(*declared)
        slope = limits.slope + 4 * found.slope_error
        shares.append(max(found.median / limits.median, found.stretch / limits.stretch, abs(found.slope) / slope))
        judge(self, parts, worker, found, declared)

    async def timed(self: Any, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return await compare(self, *args)
        finally:
            seconds.append(time.perf_counter() - start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_sync.FirstSync, "_judge", watched)
        patch.setattr(first_sync.FirstSync, "_compare", timed)
        try:
            toy_run(self_check=True, **flags)
        except PlanError:
            return {"refused": True}
        except MilesError as error:
            return {"share": max(shares, default=0.0), "stopped": str(error)[:200]}
    return {"share": round(max(shares), 4), "seconds": round(sum(seconds), 3), "stopped": ""}


def sound_runs() -> Iterator[tuple[str, dict[str, Any]]]:
    for family in (*tiny.FAMILIES, *tiny.ROUTER_FAMILIES):
        for dtype in ("float32", "bfloat16"):
            yield f"{family}, {dtype}", sound(steps=0, family=family, dtype=dtype)
    for family in [
        name for name in FAMILIES if name not in (*tiny.FAMILIES, *tiny.ROUTER_FAMILIES) and not lacking(name)
    ]:
        for dtype in ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = family_checkpoint(family, Path(folder) / "model")
                yield f"{family}, {dtype}", sound(steps=0, hf_checkpoint=checkpoint, dtype=dtype)
    for family in DOUBLED:
        with pytest.MonkeyPatch.context() as patch:
            use_double(patch, sglang_scheduler_double.SchedulerModel)
            yield f"sglang, {family}, float32", sound(steps=0, family=family, engine="sglang", device="cpu")
    for rollout in FORMATS:
        for train in ("bf16", rollout):
            precision = {"rollout_precision": rollout, "train_precision": train, "emulate_precision": True}
            for dtype in ("float32", "bfloat16"):
                label = f"{rollout} x {train}, {dtype}"
                yield label, sound(plugins=[rollout], steps=0, sizes=SIZES, dtype=dtype, **precision)
    for cache in ("float8_e4m3fn", "float8_e5m2"):
        yield f"cache {cache}", sound(steps=0, kv_cache_dtype=cache, dtype="bfloat16")
    for schedule in ("sync", "ahead", "async"):
        yield f"schedule {schedule}", sound(steps=2, schedule=schedule)


def main() -> int:
    given = options(__doc__).parse_args()
    torch.set_num_threads(given.threads)
    logging.disable(logging.CRITICAL)
    defects = {
        engine: {defect.name: stopped_by(engine, defect)[:240] for defect in DEFECTS}
        for engine in ("embedded", "sglang")
    }
    for engine, found in defects.items():
        print(f"{engine}: {sum(map(bool, found.values()))} of {len(found)} defects found")
    runs = {label: result for label, result in sound_runs() if "refused" not in result}
    false = [label for label, result in runs.items() if result["stopped"]]
    worst = max(runs.items(), key=lambda entry: entry[1]["share"])
    print(f"sound runs: {len(false)} of {len(runs)} stopped; at most {worst[1]['share']:.2f} of a limit ({worst[0]})")
    counts = {engine: sum(map(bool, found.values())) for engine, found in defects.items()}
    finish(
        "planted_defects",
        {"found": counts, "defects": defects, "sound": runs, "stopped": false, "largest_share": worst[1]["share"]},
        given.save,
        lambda: installed("torch", "transformers"),
    )
    return int(bool(false) or min(counts.values()) < len(DEFECTS))


if __name__ == "__main__":
    sys.exit(main())
