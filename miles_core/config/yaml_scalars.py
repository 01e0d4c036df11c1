"""Read and write YAML with the scalars of YAML 1.2's core schema (yaml.org/spec/1.2.2, section 10.3).

A plain value then has the same meaning in a file as on the command line: ``010`` is ten, and ``yes``, ``1:30``, ``1_000`` and dates
are texts, which the type of an option may still accept. PyYAML implements YAML 1.1, which reads ``010`` as 8, ``yes`` as true, ``1:30`` as
90, ``1_000`` as 1000, and converts dates. yaml is imported on first use.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_TAG = "tag:yaml.org,2002:"
#: Type -> pattern of its plain scalars, and the characters that they begin with.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}


def make_loader(text: str) -> Any:
    """Return a ``yaml.SafeLoader`` of ``text`` with these scalars."""
    return _loader()(text)


def dump(data: Any) -> str:
    """Return ``data`` as YAML that YAML 1.1 and YAML 1.2 parse to equal values: texts that either version reads as another type are
    quoted."""
    import yaml

    return str(yaml.dump(data, Dumper=_dumper(), sort_keys=False, allow_unicode=True))


@cache
def _loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012

    made: Any = Loader  # the stubs of yaml know no constructors of scalars
    _add_scalars(made)
    made.add_constructor(f"{_TAG}int", lambda loader, node: _to_int(loader.construct_scalar(node)))
    made.add_constructor(f"{_TAG}float", lambda loader, node: _to_float(loader.construct_scalar(node)))
    return Loader


@cache
def _dumper() -> type:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Adds these scalars to those of YAML 1.1."""

    _add_scalars(Dumper)
    return Dumper


def _add_scalars(kind: Any) -> None:
    for name, (pattern, first) in _SCALARS.items():
        kind.add_implicit_resolver(_TAG + name, re.compile(rf"(?:{pattern})\Z"), first)


def _to_int(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _to_float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
