"""Selects the samples that a report holds.

The file must stay small enough to share, so it has only some of the samples on disk: steps spread over the run and, for each step, first the
samples with the highest and lowest reward and the largest gap.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.errors import MilesError
from miles_tools.report.page import to_json
from miles_tools.report.reading import RunReader
from miles_tools.report.samples import SampleStore
from miles_tools.samples.files import KINDS

log = logging.getLogger(__name__)

#: Limits: characters of all samples together, steps of each kind, and tokens and characters of one sample.
BUDGET, STEPS, TOKENS, CHARACTERS = 3_000_000, 12, 1_000, 6_000


def select_samples(
    run: RunReader, number: int, runs: int, reward_key: str | None
) -> tuple[list[dict[str, Any]], int, int]:
    """Return whole samples of a run, the number of damaged files, and that of all files that were read.

    Args:
        run: the run.
        number: its number on the page, of ``runs``, which share the size.
        reward_key: the trained entry of rewards that are dicts.
    """
    store = SampleStore(run.directory)
    store.reward_key = reward_key
    chosen = [(kind, step) for kind in KINDS for step in _spread(run.steps[kind], STEPS)]
    found: list[dict[str, Any]] = []
    damaged = 0
    for kind, step in chosen:
        place = {"run": number, "kind": kind, "step": step}
        try:
            found += _select(store, place, BUDGET // len(chosen) // runs)
        except MilesError as error:
            log.warning("%s", error)
            damaged += 1
    return found, damaged, len(chosen)


def _spread(items: Sequence[int], count: int) -> Sequence[int]:
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _select(store: SampleStore, place: Mapping[str, Any], budget: int) -> list[dict[str, Any]]:
    """Return the highest-priority samples of a step that fit into ``budget`` characters, at least one, in their original order."""
    kind, step = place["kind"], place["step"]
    entries = store.entries(kind, step)
    order = list(range(len(entries)))
    rewards = [math.nan if e["reward"] is None else e["reward"] for e in entries]
    finite = [i for i in order if not math.isnan(rewards[i])]
    first = [max(finite, key=rewards.__getitem__), min(finite, key=rewards.__getitem__)] if finite else []
    first += [max(order, key=lambda i: entries[i]["gap"] or 0.0)] if order else []
    taken: dict[int, dict[str, Any]] = {}
    for i in dict.fromkeys((*first, *order)):
        sample = {**place, **store.sample(kind, step, i, TOKENS, CHARACTERS)}
        budget -= len(to_json(sample))
        if budget < 0 and taken:
            break
        taken[i] = sample
        if sample["images"]:
            sample["media"], used = _embed(store, sample, budget)
            budget -= used
    return [taken[i] for i in sorted(taken)]


def _embed(store: SampleStore, sample: Mapping[str, Any], budget: int) -> tuple[list[str], int]:
    """Return the images of a sample as data URIs, "" for those that are not stored or too large, and their size in characters."""
    uris: list[str] = []
    used = 0
    for number in range(sample["images"]):
        try:
            content, kind = store.image(sample["kind"], sample["step"], sample["row"], number)
        except MilesError as error:
            log.info("%s", error)
            content, kind = b"", ""
        uri = f"data:{kind};base64,{base64.b64encode(content).decode()}" if content else ""
        if used + len(uri) > budget:
            uri = ""
        used += len(uri)
        uris.append(uri)
    return uris, used
