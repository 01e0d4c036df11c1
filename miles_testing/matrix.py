"""Every pair of installed plugins in a toy run: it works, the plan refuses it with a reason, or it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from miles_core.errors import PlanError, PluginError, first_line
from miles_core.plugin.manifest import Plugin
from miles_testing.toy import plan, toy_classifier, toy_files, toy_run

#: Kinds of parts of which a run has one. Plugins with one of these are backends: their pairs are planned for ``HARDWARE`` and not run.
BACKENDS = ("engine", "trainer", "runtime")
#: The GPUs that pairs with a backend are planned for.
HARDWARE = "8xH200"
#: Sizes of the toy model: whole blocks of 32 weights, and a context with room for the schemas of tools.
SIZES = {"intermediate_size": 64, "moe_intermediate_size": 32, "max_position_embeddings": 1024}
#: Words in ``Plugin.toy`` -> family and sizes of the tiny model whose path replaces them; ``{reward_model}`` is a classifier.
_MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "{model}": ("qwen3_moe", {**SIZES, "num_hidden_layers": 3}),
    "{draft}": ("llama", {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "intermediate_size": 64}),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a combination.

    Attributes:
        plugins: name -> version, one or two.
        precision: ``ROLLOUTxTRAIN``.
        result: ``works``; ``planned`` (accepted, with a backend that is not run here); ``refused`` by the plan; ``fails``.
        reason: the plan's reasons, or the error.
        gap: the largest mean absolute difference of log-probabilities between engine and trainer in a step, in nats per token.
        seconds: time that it took.
    """

    plugins: dict[str, str]
    precision: str
    result: str
    reason: str = ""
    gap: float | None = None
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """``a + b``, with the precision if one of the plugins is a number format."""
        return " + ".join(self.plugins) + (f" ({self.precision})" if self.precision != "bf16xbf16" else "")

    @property
    def text(self) -> str:
        """The result with its gap or its reason."""
        gap = "" if self.gap is None else f", gap {self.gap:.1e}"
        return f"{self.result}{gap}{self.reason and ': ' + self.reason}"


def plugins_of_pairs(manifests: Mapping[str, Plugin]) -> list[str]:
    """Return the plugins that pairs are made of, sorted: without standard plugins and the embedded backend, which are part of every run."""
    return sorted(name for name, found in manifests.items() if not found.standard and name != "embedded")


def list_combinations(manifests: Mapping[str, Plugin], only: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return every plugin alone and every pair. With one name in ``only``, these must contain the plugin; with several names, they may contain
    no other plugins.

    Raises PluginError for a name that is not installed, or that is part of every run.
    """
    names = plugins_of_pairs(manifests)
    if unknown := [name for name in only if name not in names]:
        raise PluginError(f"--only {','.join(only)}: there is no plugin {unknown[0]}; plugins are {', '.join(names)}")
    every = [*((name,) for name in names), *combinations(names, 2)]
    if len(only) == 1:
        return [each for each in every if only[0] in each]
    return [each for each in every if set(each) <= set(only)] if only else every


def toy_options(names: Iterable[str], manifests: Mapping[str, Plugin]) -> dict[str, Any]:
    """Return the options of a toy run with these plugins: ``Plugin.toy`` of each, and the flags that choose backends."""
    options: dict[str, Any] = {}
    for manifest in (manifests[name] for name in names):
        options |= {kind: next(iter(manifest.provides[kind])) for kind in BACKENDS if kind in manifest.provides}
        for flag, value in manifest.toy.items():
            before = options.get(flag)
            both = isinstance(before, Mapping) and isinstance(value, Mapping)
            options[flag] = {**before, **value} if both else value  # type: ignore[dict-item]
    filled: dict[str, Any] = _fill(options)
    return filled


def _fill(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _fill(each) for key, each in value.items()}
    if value == "{reward_model}":
        return str(toy_classifier(**SIZES))
    if not isinstance(value, str) or value not in _MODELS:
        return value
    family, sizes = _MODELS[value]
    return str(toy_files(family, **sizes) / "model")


def attempt(names: Sequence[str], manifests: Mapping[str, Plugin], pair: tuple[str, str] | None = None) -> Outcome:
    """Plan and run a combination in this process. ``pair``: the precisions; the first that one of the plugins lists by default."""
    listed = [(each.rollout, each.train) for name in names for each in manifests[name].pairs]
    rollout, train = pair or next(iter(listed), ("bf16", "bf16"))
    options: dict[str, Any] = {"rollout_precision": rollout, "train_precision": train, "sizes": SIZES}
    options |= toy_options(names, manifests)
    options["emulate_precision"] = bool(listed)
    start = time.monotonic()
    attempt_with = _plan_only if set(BACKENDS) & options.keys() else _run_toy
    try:
        result, reason, gap = attempt_with(names, options)
    except PlanError as error:
        result, reason, gap = "refused", reason_of(error), None
    except Exception as error:
        result, reason, gap = "fails", f"{type(error).__name__}: {first_line(error)}", None
    versions = {name: manifests[name].version for name in names}
    return Outcome(versions, f"{rollout}x{train}", result, reason, gap, round(time.monotonic() - start, 2))


def _plan_only(names: Sequence[str], options: Mapping[str, Any]) -> tuple[str, str, None]:
    plan(names, [f"hardware={HARDWARE}"], **options)
    return "planned", "", None


def _run_toy(names: Sequence[str], options: Mapping[str, Any]) -> tuple[str, str, float | None]:
    """Return the result of a toy run, the reason if it fails, and the largest gap of a step."""
    run = toy_run(names, **options)
    inactive = sorted(set(names) - set(run.run.plan.order))
    if inactive:
        return "fails", f"not active: {', '.join(inactive)}", None
    gaps, norms = (
        [value for record in run.metrics for key, value in record.items() if key.endswith(name)]
        for name in ("mismatch/abs_log_prob", "train/grad_norm")
    )
    if not norms or min(norms) <= 0:
        return "fails", "a step has no gradient", max(gaps, default=None)
    return "works", "", max(gaps, default=None)


def reason_of(error: PlanError) -> str:
    """Return the reasons of a refused plan in one line."""
    reasons = [f"{problem.headline}: {problem.because}" for problem in error.problems]
    return "; ".join(dict.fromkeys(reasons)) or first_line(error)


def read(path: Path) -> list[Outcome]:
    """Read stored outcomes; [] if there is no file.

    Raises PluginError if a line is not an outcome; a line that was not written completely is skipped if it is the last one."""
    outcomes: list[Outcome] = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            outcomes.append(Outcome(**json.loads(line)))
        except (ValueError, TypeError):
            if number == len(lines) and not line.endswith("\n"):
                break
            raise PluginError(
                f"{path} line {number} is not an outcome of miles plugins matrix; give another file"
            ) from None
    return outcomes


def write(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Replace a file of outcomes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    lines = (json.dumps(dataclasses.asdict(each)) + "\n" for each in outcomes)
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)


def attempt_all(
    wanted: Sequence[tuple[str, ...]], manifests: Mapping[str, Plugin], workers: int = 1
) -> Iterator[Outcome]:
    """Attempt combinations and yield their outcomes in order; with several workers in as many processes."""
    if workers == 1:
        yield from (attempt(names, manifests) for names in wanted)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(workers, get_context("spawn"), _use_one_thread) as pool:
        yield from pool.map(_attempt_installed, wanted)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _attempt_installed(names: tuple[str, ...]) -> Outcome:
    from miles_core.plugin.discovery import discover

    return attempt(names, discover())
