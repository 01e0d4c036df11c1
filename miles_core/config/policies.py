"""Options of one policy: the table ``policies`` of a configuration file.

``policies: {solver: {lr: 1e-6}, judge: {hf_checkpoint: DIR, role: frozen}}`` names the policies of a run. What stands under a name
takes the place of the run's own value for that policy; keys are those of the whole file. Two more keys exist: ``role`` and
``generates``, see ``miles_core.contracts.policy``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles_core.config import value
from miles_core.config.flags import Assignment
from miles_core.config.schema import CORE, Option, Schema
from miles_core.errors import ConfigError
from miles_core.nearest import did_you_mean

TABLE = "policies"
PREFIX = f"{TABLE}."
#: Keys under a policy's name that are no options.
ROLE, GENERATES = "role", "generates"
CHECKPOINT = "model.hf_checkpoint"
ROLES = ("train", "critic", "frozen")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

#: Core's tables that hold for a policy, and the options of other tables that do.
_GROUPS = frozenset({"model", "algorithm", "train", "precision"})
_ROLLOUT = (
    *("temperature", "top_p", "top_k", "stop", "stop_token_ids", "full_vocab_logprobs"),
    *("max_response_len", "max_context_len", "max_running_requests", "kv_cache_dtype", "precision"),
)
_OPTIONS = frozenset(f"rollout.{name}" for name in _ROLLOUT)
#: Options of those tables that the whole run shares.
_SHARED = frozenset({"train.seed", "model.device", "model.model_name"})


def is_own(option: Option) -> bool:
    """Whether policies may differ in an option. Plugins' options count as such: who reads them asks ``Run.config_of``."""
    if option.owner != CORE:
        return True
    return (option.group in _GROUPS or option.path in _OPTIONS) and option.path not in _SHARED


def option_of(schema: Schema, key: str, where: str) -> Option:
    """The option that a key under a policy's name sets: ``lr``, ``train.lr`` or ``rollout-temperature``.

    Raises:
        ConfigError: there is none, or the whole run shares it.
    """
    flag = schema.flags.get("--" + key.lstrip("-").replace("_", "-"))
    option = schema.find(key) or (flag.option if flag is not None else None)
    if option is None:
        known = [o.path for o in schema.options.values() if is_own(o)]
        names = [*known, *(path.partition(".")[2] for path in known), ROLE, GENERATES]
        raise ConfigError(f"{where}: a policy has no option {key!r}{did_you_mean(key, names, '; ')}")
    return own(option, where)


def own(option: Option, where: str) -> Option:
    """``option``; ConfigError where the whole run shares it."""
    if not is_own(option):
        raise ConfigError(
            f"{where}: {option.fact} belongs to the whole run and not to one policy; give it as {option.flag}"
        )
    return option


def split(path: str) -> tuple[str, str]:
    """``policies.solver.train.lr`` -> (``solver``, ``train.lr``)."""
    name, _, rest = path.removeprefix(PREFIX).partition(".")
    return name, rest


def prefixed(name: str, assignments: Iterable[Assignment]) -> list[Assignment]:
    """What is set under a policy's name, as assignments of the whole configuration."""
    return [replace(a, path=f"{PREFIX}{name}.{a.path}") for a in assignments]


def settled(
    schema: Schema, assignments: Sequence[Assignment], problems: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The checked values under each policy's name, in the order of the file, and where each came from.

    Args:
        schema: of the options.
        assignments: those whose path begins with ``policies.``, the strongest last.
        problems: takes a sentence for whatever is wrong.
    """
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for assignment in assignments:
        name, path = split(assignment.path)
        values.setdefault(name, {})
        try:
            checked = _checked(schema, name, path, assignment)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if path:
            values[name][path] = checked
            origins[assignment.path] = assignment.origin
    return values, origins


def _checked(schema: Schema, name: str, path: str, assignment: Assignment) -> Any:
    raw, origin = assignment.raw, assignment.origin
    if not _NAME.fullmatch(name) or name == "state":
        raise ConfigError(
            f"{origin}: {name!r} cannot be the name of a policy, since it names a folder of every checkpoint, beside 'state'; use "
            "letters, digits, _ and -"
        )
    if path == ROLE:
        if raw not in ROLES:
            raise ConfigError(
                f"{origin}: the policy {name} has the role {raw!r}; it is one of {', '.join(ROLES)}"
                f"{did_you_mean(str(raw), ROLES, '; ')}"
            )
        return raw
    if path == GENERATES:
        if not isinstance(raw, bool):
            raise ConfigError(f"{origin}: generates is {raw!r} for the policy {name}; write true or false")
        return raw
    return value.check(own(schema.options[path], origin), raw, origin) if path else None


def as_table(schema: Schema, values: Mapping[str, Any]) -> dict[str, Any]:
    """One policy's values as they stand in a file."""
    table: dict[str, Any] = {key: values[key] for key in (ROLE, GENERATES) if key in values}
    for path, item in values.items():
        if path in schema.options:
            group, _, name = path.partition(".")
            table.setdefault(group, {})[name] = item
    return table
