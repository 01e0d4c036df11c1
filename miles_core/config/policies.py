"""Options of single policies: the table ``policies`` of a configuration file.

``policies: {solver: {lr: 1e-6}, judge: {hf_checkpoint: DIR, role: frozen}}`` names the policies of a run. The values in a policy's
table override the run's values for that policy; the keys are those of a configuration file. The additional keys ``role`` and
``generates`` are described in ``miles_core.contracts.run``.
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
#: Keys of a policy's table that are not options.
ROLE, GENERATES = "role", "generates"
CHECKPOINT = "model.hf_checkpoint"
ROLES = ("train", "critic", "frozen")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

#: Core's tables that a policy may override, and single options of other tables.
_GROUPS = frozenset({"model", "algorithm", "train", "precision"})
_ROLLOUT = (
    *("temperature", "top_p", "top_k", "stop", "stop_token_ids", "full_vocab_logprobs"),
    *("max_response_len", "max_context_len", "max_running_requests", "kv_cache_dtype", "precision"),
)
_OPTIONS = frozenset(f"rollout.{name}" for name in _ROLLOUT)
#: The device of all models.
DEVICE = "model.device"
#: Options of these tables that apply to the whole run.
_SHARED = frozenset({"train.seed", DEVICE, "model.model_name"})


def is_own(option: Option) -> bool:
    """Whether a policy may override an option. All options of plugins count; plugins read them through ``Run.config_of``."""
    if option.owner != CORE:
        return True
    return (option.group in _GROUPS or option.path in _OPTIONS) and option.path not in _SHARED


def option_of(schema: Schema, key: str, where: str) -> Option:
    """Return the option that a key of a policy's table sets: ``lr``, ``train.lr`` or ``rollout-temperature``.

    Raises:
        ConfigError: the option does not exist, or applies only to the whole run.
    """
    flag = schema.flags.get("--" + key.lstrip("-").replace("_", "-"))
    option = schema.find(key) or (flag.option if flag is not None else None)
    if option is None:
        known = [o.path for o in schema.options.values() if is_own(o)]
        names = [*known, *(path.partition(".")[2] for path in known), ROLE, GENERATES]
        raise ConfigError(f"{where}: a policy has no option {key!r}{did_you_mean(key, names, '; ')}")
    return require_own(option, where)


def require_own(option: Option, where: str) -> Option:
    """Return ``option``. Raises ConfigError if the option applies only to the whole run."""
    if not is_own(option):
        raise ConfigError(
            f"{where}: {option.fact} belongs to the whole run and not to one policy; give it as {option.flag}"
        )
    return option


def split(path: str) -> tuple[str, str]:
    """Split a path: ``policies.solver.train.lr`` -> (``solver``, ``train.lr``)."""
    name, _, rest = path.removeprefix(PREFIX).partition(".")
    return name, rest


def add_prefix(name: str, assignments: Iterable[Assignment]) -> list[Assignment]:
    """Add ``policies.<name>.`` to the paths of a policy's assignments."""
    return [replace(a, path=f"{PREFIX}{name}.{a.path}") for a in assignments]


def check_assignments(
    schema: Schema, assignments: Sequence[Assignment], problems: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Check the values of all policies.

    Args:
        schema: schema of the options.
        assignments: assignments with paths ``policies.<name>.<option>``, in ascending precedence.
        problems: receives an error message for each invalid value.

    Returns:
        policy name -> path -> checked value, in the order of the file, and path -> origin.
    """
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for assignment in assignments:
        name, path = split(assignment.path)
        values.setdefault(name, {})
        try:
            checked = _check_value(schema, name, path, assignment)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if path:
            values[name][path] = checked
            origins[assignment.path] = assignment.origin
    return values, origins


def _check_value(schema: Schema, name: str, path: str, assignment: Assignment) -> Any:
    raw, origin = assignment.raw, assignment.origin
    if not _NAME.fullmatch(name) or name == "state":
        raise ConfigError(
            f"{origin}: {name!r} cannot be the name of a policy, since it names a folder of every checkpoint, next to 'state'; use "
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
    return value.check(require_own(schema.options[path], origin), raw, origin) if path else None


def as_table(schema: Schema, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one policy's values to a table of a configuration file."""
    table: dict[str, Any] = {key: values[key] for key in (ROLE, GENERATES) if key in values}
    for path, item in values.items():
        if path in schema.options:
            group, _, name = path.partition(".")
            table.setdefault(group, {})[name] = item
    return table
