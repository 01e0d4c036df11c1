"""Finds the first step, phase, sample, token and tensor in which two runs part.

A step is compared in the order in which a run computes it (``PHASES``), so the first difference causes the later ones, unless a phase
before it was not stored. Differences of options and versions are listed too, but only data decides where the runs part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_core.errors import MilesError, PluginError
from miles_core.plugin.discovery import discover
from miles_tools.replay.steps import describe_steps
from miles_tools.replay.stored_run import StoredRun, StoredSample
from miles_tools.replay.tolerance import Tolerance

#: The phases of a step in order. ``weights`` are those with which it starts.
PHASES = ("weights", "prompt data", "rollout", "reward", "advantage", "loss", "gradient", "optimizer", "sync")
#: Metrics of training that are equal if the computation is, by the phase that they show.
_TRAINING = re.compile(r"(^|/)(train|mismatch)/")
_GRADIENT, _OPTIMIZER = re.compile(r"(^|/)train/grad_norm"), re.compile(r"(^|/)train/lr$")
#: Metrics that are measurements.
MEASURED = re.compile(r"second|time|memory|bytes|flops|mfu|restart")
#: Attributes of a whole sample.
_WHOLE = frozenset({"prompt", "label", "media", "status", "weight_versions", "removed", "reward"})
#: Fields that training adds to samples before it computes advantages; all others come from the rollout.
_OF_TRAINING = frozenset(
    {"values", "old_log_probs", "ref_log_probs", "candidates", "teacher_log_probs", "teacher_top_log_probs"}
)


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs.

    Attributes:
        step: the step, from 1.
        phase: one of ``PHASES``.
        what: what differs: an attribute, a metric or a kind of tensors.
        values: the value in each run, as text.
        sample: index of the sample; None if the difference is not in one.
        token: index of the token in its response (in its prompt, if ``what`` is the prompt's tokens); None if there is none.
        tensor: name of the first tensor; "" if none is known.
        tensors: number of tensors that differ, and of all.
        plugins: plugins that the data or the differences of configuration point to.
    """

    step: int
    phase: str
    what: str
    values: tuple[str, str]
    sample: int | None = None
    token: int | None = None
    tensor: str = ""
    tensors: tuple[int, int] = (0, 0)
    plugins: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = "" if self.sample is None else f", sample {self.sample}"
        place += "" if self.token is None else f", token {self.token}"
        if self.tensor:
            place += f", tensor {self.tensor} ({self.tensors[0]} of {self.tensors[1]} differ)"
        plugins = f"; plugin {', '.join(self.plugins)}" if self.plugins else ""
        a, b = self.values
        return f"step {self.step}, {self.phase}{place}: {self.what} {a} | {b}{plugins}"


def common_steps(a: StoredRun, b: StoredRun) -> list[int]:
    """Return the steps that both runs completed.

    Raises:
        MilesError: there is none, or both are the same run.
    """
    if a.path == b.path:
        raise MilesError(f"{a.path}: this run is given twice; give different runs to compare them")
    steps = sorted({*a.steps} & {*b.steps})
    if not steps:
        raise MilesError(
            f"{a.path} completed {describe_steps(a.steps)} and {b.path} {describe_steps(b.steps)}: no step is in both, so they cannot be "
            "compared"
        )
    return steps


def list_differences(a: StoredRun, b: StoredRun) -> list[tuple[str, str, str]]:
    """Return (name, value in a, value in b) of options, plugins, versions and recorded threads that differ; "-" where a run has none. Options of
    a plugin that only one run has are listed if they are not defaults."""
    both = {*a.options} & {*b.options}
    options = [{n: v for n, v in run.options.items() if n in both or n in run.chosen} for run in (a, b)]
    tables: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("", options[0], options[1]),
        ("plugin ", a.plugins, b.plugins),
        ("", a.versions, b.versions),
    ]
    rows = []
    for start, one, other in tables:
        for name in dict.fromkeys([*one, *other]):
            if one.get(name) != other.get(name):
                rows.append((f"{start}{name}", str(one.get(name, "-")), str(other.get(name, "-"))))
    if a.recorded and b.recorded:
        one_count, other_count = (run.threads(min(run.recorded)) for run in (a, b))
        if one_count != other_count:
            rows.append(("threads", str(one_count), str(other_count)))
    return rows


def find_difference(a: StoredRun, b: StoredRun, tolerance: float = 0.0) -> Difference | None:
    """Return the first difference of two runs in the steps of ``common_steps``; None if what they stored is equal.

    Args:
        a, b: the runs.
        tolerance: see ``Tolerance.relative``; above 0, checksums are not compared, because rounding changes them.
    """
    for number, step in enumerate(common_steps(a, b)):
        found = next(StepComparison(a, b, step, Tolerance(tolerance), first=number == 0).differences(), None)
        if found is not None:
            return found
    return None


class StepComparison:
    """Compares one step of two runs.

    Args:
        a, b: the runs.
        step: the step, from 1.
        same: compares values.
        first: whether it is the first step of both, so that the engine's weights before it are compared too.
    """

    def __init__(self, a: StoredRun, b: StoredRun, step: int, same: Tolerance, first: bool = False) -> None:
        self.a, self.b, self.step, self.same, self.first = a, b, step, same, first
        self.exact = step in a.recorded and step in b.recorded

    def differences(self) -> Iterator[Difference]:
        """Yield the differences of the step in the order of ``PHASES``, the first one of each kind."""
        yield from self.weights()
        pairs: list[tuple[StoredSample, StoredSample]] = []
        one, other = (run.samples(self.step, self.exact) for run in (self.a, self.b))
        if one is not None and other is not None:
            yield from self.order(one, other)
            pairs = [*zip(one, other, strict=False)]
        for phase in (self.prompts, self.rollouts, self.rewards, self.advantages):
            yield from phase(pairs)
        yield from self.training(pairs)
        yield from self.sync()

    def weights(self) -> Iterator[Difference]:
        """Compare the weights with which the step starts: of the trainers, and, for the first step, of the engines."""
        yield from self._tensors("weights", "weights before the step", self._sums(0, "before"))
        if self.first:
            yield from self._tensors("weights", "weights in the engine", self._engine_sums(self.step - 1))

    def order(self, one: Sequence[StoredSample], other: Sequence[StoredSample]) -> Iterator[Difference]:
        """Compare the number of samples: of each prompt in the whole batch, or of one prompt, which lacks a sample."""
        sizes = [_group_sizes(samples) for samples in (one, other)]
        if sizes[0] == sizes[1]:
            return
        uniform = [{*size.values()} for size in sizes]
        if all(len(each) == 1 for each in uniform) and uniform[0] != uniform[1]:
            values = tuple(str(max(each)) for each in uniform)
            yield self._make("prompt data", "samples per prompt", values)
        elif sizes[0].keys() != sizes[1].keys():
            values = tuple(f"{len(size)} prompts" for size in sizes)
            group = min({*sizes[0]} ^ {*sizes[1]})
            yield self._make("prompt data", f"group {group} is in one run only:", values)
        else:
            indexes = [{s.index for s in samples} for samples in (one, other)]
            index = min(indexes[0] ^ indexes[1], default=None)
            values = tuple(f"{len(samples)} samples" for samples in (one, other))
            yield self._make("rollout", "a sample is in one run only:", values, sample=index)

    def prompts(self, pairs: Sequence[tuple[StoredSample, StoredSample]]) -> Iterator[Difference]:
        """Compare prompts, labels and media."""
        yield from self._first(pairs, "prompt data", lambda sample: sample.prompt)

    def rollouts(self, pairs: Sequence[tuple[StoredSample, StoredSample]]) -> Iterator[Difference]:
        """Compare responses and what the engine recorded with them."""
        yield from self._first(
            pairs,
            "rollout",
            lambda s: {"tokens": s.tokens, **s.engine, **{n: v for n, v in s.fields.items() if n not in _OF_TRAINING}},
        )

    def rewards(self, pairs: Sequence[tuple[StoredSample, StoredSample]]) -> Iterator[Difference]:
        """Compare rewards."""
        yield from self._first(pairs, "reward", lambda sample: {"reward": sample.reward})

    def advantages(self, pairs: Sequence[tuple[StoredSample, StoredSample]]) -> Iterator[Difference]:
        """Compare advantages, and what training added to samples before it computed them."""
        yield from self._first(
            pairs,
            "advantage",
            lambda s: {**{n: v for n, v in s.fields.items() if n in _OF_TRAINING}, "advantages": s.advantages},
        )

    def training(self, pairs: Sequence[tuple[StoredSample, StoredSample]]) -> Iterator[Difference]:
        """Compare the optimizer steps: loss, gradient and optimizer of each."""
        yield from self._first(pairs, "loss", lambda sample: {"train_log_probs": sample.log_probs})
        loss = [*self._metrics("loss", lambda name: not _GRADIENT.search(name) and not _OPTIMIZER.search(name))]
        count = max((len(steps) for run in (self.a, self.b) for steps in run.sums(self.step).values()), default=0)
        for number in range(count):
            if gradient := [*self._tensors("gradient", "gradients", self._sums(number, "gradients"))]:
                yield from loss  # means over all optimizer steps: they also differ if an earlier one changed the weights otherwise
                yield from gradient
            yield from self._tensors("optimizer", "weights after the step", self._sums(number, "after"))
        yield from loss
        yield from self._metrics("gradient", lambda name: bool(_GRADIENT.search(name)))
        yield from self._metrics("optimizer", lambda name: bool(_OPTIMIZER.search(name)))
        if not count:
            yield from self._checkpoints()

    def sync(self) -> Iterator[Difference]:
        """Compare the weights in the engines after the step."""
        yield from self._tensors("sync", "weights in the engine", self._engine_sums(self.step))

    def _first(
        self,
        pairs: Sequence[tuple[StoredSample, StoredSample]],
        phase: str,
        values: Callable[[StoredSample], Mapping[str, Any]],
    ) -> Iterator[Difference]:
        """Yield the first difference of the samples in these values: that of the earliest token, in the first sample that has one."""
        for one, other in pairs:
            a, b = values(one), values(other)
            found = {name: self.same.find(a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])}
            places = [(_token(one, name, index, a, b), name) for name, index in found.items() if index is not None]
            if not places:
                continue
            # attributes of the whole sample follow from its tokens
            token, name = min(places, key=lambda place: (place[1] in _WHOLE, place[0] or 0))
            texts = tuple(_show(each.get(name), found[name] or 0, name in _WHOLE) for each in (a, b))
            owner = self._owners().get(name)
            yield self._make(phase, name, texts, one.index, token, (owner,) if owner else ())
            return

    def _metrics(self, phase: str, chosen: Callable[[str], bool]) -> Iterator[Difference]:
        a, b = (run.metrics.get(self.step, {}) for run in (self.a, self.b))
        names = [n for n in a if n in b and _TRAINING.search(n) and not MEASURED.search(n) and chosen(n)]
        name = next((name for name in names if self.same.find(a[name], b[name]) is not None), None)
        if name is not None:
            yield self._make(phase, name, (f"{a[name]!r}", f"{b[name]!r}"))

    def _tensors(self, phase: str, what: str, sums: tuple[dict[str, int], dict[str, int]]) -> Iterator[Difference]:
        a, b = sums
        if self.same.relative or not a or not b:
            return
        names = [*dict.fromkeys([*a, *b])]
        different = [name for name in names if a.get(name) != b.get(name)]
        if different:
            first = different[0]
            texts = tuple(f"{each[first]:016x}" if first in each else "absent" for each in (a, b))
            count = (len(different), len(names))
            yield self._make(phase, what, texts, tensor=first, tensors=count)

    def _sums(self, number: int, kind: str) -> tuple[dict[str, int], dict[str, int]]:
        """Return the checksums of an optimizer step in both runs; none if they had other numbers of ranks, which hold other parts."""
        both = [run.sums(self.step) for run in (self.a, self.b)]
        if both[0].keys() != both[1].keys():
            return {}, {}
        named = len(both[0]) > 1
        a, b = (
            {
                f"{owner} {tensor}" if named else tensor: value
                for owner, steps in run.items()
                if number < len(steps)
                for tensor, value in steps[number].get(kind, {}).items()
            }
            for run in both
        )
        return a, b

    def _engine_sums(self, step: int) -> tuple[dict[str, int], dict[str, int]]:
        both = [run.engine(step) for run in (self.a, self.b)]
        if both[0].keys() != both[1].keys():
            return {}, {}
        named = len(both[0]) > 1
        a, b = ({f"{w} {t}" if named else t: v for w, sums in run.items() for t, v in sums.items()} for run in both)
        return a, b

    def _checkpoints(self) -> Iterator[Difference]:
        """Compare the trainers' weights in the checkpoints of the step, which both may have."""
        if self.same.relative or not all(self.step in run.checkpoints.steps() for run in (self.a, self.b)):
            return
        from safetensors import SafetensorError, safe_open

        paths = [run.checkpoints.path(self.step) for run in (self.a, self.b)]
        for file in sorted(paths[0].glob("*/trainer/*.safetensors")):
            twin = paths[1] / file.relative_to(paths[0])
            if not twin.is_file():
                continue
            try:
                with safe_open(file, "pt") as one, safe_open(twin, "pt") as other:
                    names = [*one.keys()]
                    common = {*names} & {*other.keys()}
                    different = [n for n in names if n in common and not _equal(one.get_tensor(n), other.get_tensor(n))]
            except (SafetensorError, OSError) as error:
                raise MilesError(f"{file} or {twin} cannot be read ({error}); delete that checkpoint") from error
            if different:
                values = (file.parents[2].name, "another value")
                count = (len(different), len(names))
                yield self._make("optimizer", "checkpoint", values, tensor=different[0], tensors=count)
                return

    def _owners(self) -> Mapping[str, str]:
        """Return field -> the plugin of both runs that declares it."""
        owners: dict[str, str] = {}
        catalogue = discover()
        for name in {*self.a.plugins, *self.b.plugins}:
            try:
                owners |= {declared.name: name for declared in catalogue[name].fields}
            except (KeyError, PluginError):  # not installed here, or a single file
                continue
        return owners

    def _make(
        self,
        phase: str,
        what: str,
        values: tuple[str, ...],
        sample: int | None = None,
        token: int | None = None,
        plugins: tuple[str, ...] = (),
        tensor: str = "",
        tensors: tuple[int, int] = (0, 0),
    ) -> Difference:
        named = plugins or tuple(plugins_apart(self.a, self.b))
        return Difference(self.step, phase, what, (values[0], values[1]), sample, token, tensor, tensors, named)


def plugins_apart(a: StoredRun, b: StoredRun) -> list[str]:
    """Return the plugins that are in one of the runs only, or differ in their version, file or options."""
    known = dict.fromkeys([*a.plugins, *b.plugins])
    tables = {name.partition(".")[0] for name, one, other in list_differences(a, b) if one != other}
    return [name for name in known if a.plugins.get(name) != b.plugins.get(name) or name in tables]


def _group_sizes(samples: Sequence[StoredSample]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for sample in samples:
        sizes[sample.group] = sizes.get(sample.group, 0) + 1
    return sizes


def _token(sample: StoredSample, name: str, index: int, a: Mapping[str, Any], b: Mapping[str, Any]) -> int | None:
    """Return the token to which an index belongs; None for values of whole samples or of the prompt's tokens. A field with more rows than
    the response has tokens begins with the prompt's."""
    if name in _WHOLE or a.get(name) is None or b.get(name) is None or not hasattr(a[name], "__len__"):
        return None
    if name in sample.fields and len(a[name]) > len(sample.tokens):
        index -= len(sample.prompt["prompt tokens"])
    return index if index >= 0 else None


def _show(value: Any, index: int, whole: bool) -> str:
    """Return a value, or its entry at an index, as short text."""
    if value is None:
        return "absent"
    if not whole and hasattr(value, "__len__"):
        if index >= len(value):
            return "ended"
        value = value[index]
    text = repr(np.asarray(value).tolist() if hasattr(value, "__array__") else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _equal(a: Any, b: Any) -> bool:
    import torch

    return bool(a.dtype == b.dtype and torch.equal(a, b))
