"""What the plan says of values that no rule can look into: an address, a draft model, and options that SGLang reads as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from miles_core.plugin import Facts, Problem, Review, described
from miles_sglang.config import server_fields
from miles_sglang.memory import server_of, too_small

_NAMES = tuple(str(field["name"]) for field in server_fields())


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """See ``miles_core.plugin.Plugin.review``."""
    problems = (*_address(facts), *_draft(facts), *_tables(facts), *_gpus(facts), *too_small(facts, model))
    return Review(problems=problems)


def _gpus(facts: Facts) -> Iterator[Problem]:
    """A runtime that gives an engine several GPUs, of which SGLang would use others."""
    name = "ray.rollout_num_gpus_per_engine"
    given = facts.value(name) if facts.value("plugin.ray") else None
    server = server_of(facts, 0.0)
    if given is None or facts.value("sglang.url") or facts.value("engine") != "sglang" or server.gpus == given:
        return
    names = ("sglang.tp_size", "sglang.pp_size", name)
    why = "SGLang divides a model among tensor x pipeline ranks, with a GPU for each"
    needs = f"--sglang-tp-size x --sglang-pp-size = {given}, the GPUs of an engine"
    values = tuple(described(facts.lookup(each)) for each in names)
    tries = [{"sglang.tp_size": given // server.pp}] if not given % server.pp else []
    tries.append({name: server.gpus})
    yield Problem("sglang", needs, why, values, choices=names, tries=lambda: tries)


def _address(facts: Facts) -> Iterator[Problem]:
    url = facts.value("sglang.url")
    if url and not _is_address(url):
        why = "a server is spoken to over HTTP, at its host and port"
        yield Problem("sglang", "an address like http://host:30000", why, (described(facts.lookup("sglang.url")),))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False


def _draft(facts: Facts) -> Iterator[Problem]:
    """SGLang 0.5.17 takes a draft model with an MTP layer for that layer alone, and ends with an assertion about pipelines."""
    path = facts.value("sglang.speculative_draft_model_path")
    if not path or facts.value("sglang.speculative_algorithm") != "STANDALONE":
        return
    try:
        config = json.loads((Path(str(path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a name on a hub, or what SGLang itself will say
        return
    if config.get("num_nextn_predict_layers"):
        why = f"SGLang takes {path}, which has one, for that layer alone; draft with a checkpoint that has none"
        yield Problem(
            "sglang",
            "a draft model without an MTP layer",
            why,
            (described(facts.lookup("sglang.speculative_draft_model_path")),),
        )


def _tables(facts: Facts) -> Iterator[Problem]:
    """A text that begins like a table and is none: SGLang would say so after its start, and not of which option."""
    for name in _NAMES:
        fact = facts.lookup(f"sglang.{name}")
        if not fact.chosen or not isinstance(fact.value, str) or not fact.value.lstrip().startswith("{"):
            continue
        try:
            json.loads(fact.value)
        except ValueError as error:
            why = f"SGLang reads this option as a table: {error}; names and texts are in double quotes"
            yield Problem("sglang", f"JSON in --sglang-{name.replace('_', '-')}", why, (described(fact),))
