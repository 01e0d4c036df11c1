"""The sample browser of the report: selects samples, and prepares their data.

The page must stay small enough to share, so it contains only some of the samples on disk: steps spread over the run and, for each step, first
the samples with the highest and lowest reward and the largest gap.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.redact import show_controls
from miles_tools.report.conversation import turns_of
from miles_tools.samples.files import KINDS, read_file, rollout_files

log = logging.getLogger(__name__)

#: Limits: characters of all samples together, steps of each kind, and tokens and characters of one sample.
BUDGET, STEPS, TOKENS, CHARACTERS = 3_000_000, 12, 1_000, 6_000


def browser(run_dir: Path, reward_key: str | None) -> dict[str, Any]:
    """What the template needs: ``data`` (JSON that is safe inside of a script element), ``shown`` and ``held`` (numbers of samples),
    ``files`` and ``damaged`` (numbers of files that were read and of those without usable samples); empty for a run without samples on disk.

    Args:
        run_dir: the run directory.
        reward_key: the trained entry of rewards that are dicts.
    """
    chosen = [(kind, path) for kind in KINDS for path in _spread(list(rollout_files(run_dir, kind).values()), STEPS)]
    texts: list[str] = []
    held = damaged = 0
    for kind, path in chosen:
        rows = read_file(path)
        if rows is None:
            damaged += 1
            continue
        held += len(rows)
        try:
            texts += _within([_entry(row, kind, reward_key) for row in rows], BUDGET // len(chosen))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            log.warning("%s is not what a run wrote (%s); the samples of that step are left out", path, error)
            damaged += 1
    if not texts and not damaged:
        return {}
    data = f"[{','.join(texts)}]".replace("<", "\\u003c")
    return {
        "data": data,
        "shown": len(texts),
        "held": held,
        "steps": len({path.name for _, path in chosen}),
        "damaged": damaged,
        "files": len(chosen),
    }


def _spread(items: Sequence[Path], count: int) -> Sequence[Path]:
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _within(entries: list[dict[str, Any]], budget: int) -> list[str]:
    """Return the highest-priority entries that fit into ``budget``, at least one, as JSON in their original order."""
    order = list(range(len(entries)))
    rewards = [e["reward"] if e["reward"] is not None else math.nan for e in entries]
    finite = [i for i in order if not math.isnan(rewards[i])]
    first = [max(finite, key=rewards.__getitem__), min(finite, key=rewards.__getitem__)] if finite else []
    first += [max(order, key=lambda i: entries[i]["gap"] or 0.0)] if order else []
    taken: dict[int, str] = {}
    for i in dict.fromkeys((*first, *order)):
        text = json.dumps(_show(entries[i]), separators=(",", ":"), allow_nan=False)
        budget -= len(text) + 1
        if budget < 0 and taken:
            break
        taken[i] = text
    return [taken[i] for i in sorted(taken)]


def _show(value: Any) -> Any:
    """Make the control characters of all texts visible; the page would decode them from JSON."""
    if isinstance(value, str):
        return show_controls(value)
    if isinstance(value, dict):
        return {show_controls(key): _show(item) for key, item in value.items()}
    return [_show(item) for item in value] if isinstance(value, list) else value


def _entry(row: Mapping[str, Any], kind: str, reward_key: str | None) -> dict[str, Any]:
    reward = row.get("reward")
    parts = {str(k): _number(v) for k, v in reward.items()} if isinstance(reward, Mapping) else {}
    mask, engine, trainer = row.get("loss_mask"), row.get("rollout_log_probs"), row.get("train_log_probs")
    pieces = row.get("pieces") or []
    gaps = [
        abs(q - p)
        for p, q, kept in zip(engine or (), trainer or (), mask or [1] * len(pieces), strict=False)
        if kept and p is not None and q is not None
    ]
    advantages = row.get("advantages")
    if advantages and len(set(advantages)) == 1:
        advantages = advantages[:1]
    return {
        "kind": kind,
        "step": row.get("step"),
        "set": row.get("set", ""),
        "index": row.get("index"),
        "group": row.get("group"),
        "prompt": _cut(_prompt(row.get("prompt", ""))),
        "response": _cut(str(row.get("response", ""))) if not pieces else "",
        "label": None if row.get("label") is None else _cut(str(row["label"])),
        "reward": parts.get(str(reward_key)) if parts else _number(reward),
        "parts": parts,
        "status": row.get("status", ""),
        "gap": float(f"{sum(gaps) / len(gaps):.3g}") if gaps else None,
        "length": len(pieces),
        "pieces": pieces[:TOKENS],
        "mask": mask[:TOKENS] if mask and not all(mask) else None,
        "engine": _shorten(engine),
        "trainer": _shorten(trainer),
        "advantages": _shorten(advantages),
        "turns": turns_of(row),
    }


def _shorten(values: Sequence[float | None] | None) -> list[float | None] | None:
    return None if values is None else [None if v is None else float(f"{v:.5g}") for v in values[:TOKENS]]


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} ... ({len(text) - CHARACTERS} more characters)"


def _prompt(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return str(prompt)
    messages = [m if isinstance(m, Mapping) else {"content": m} for m in prompt]
    return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in messages)
