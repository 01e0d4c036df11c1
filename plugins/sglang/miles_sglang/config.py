"""The options of this plugin: four of its own, and one for each option of SGLang's server (``server_args.json``)."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

from miles_core.plugin import option
from miles_sglang.read_server_args import TABLE

#: ServerArgs that the engine sets -> the core option that determines the value; empty where the engine contract fixes it.
OWN = {
    "model_path": "--hf-checkpoint",
    "tokenizer_path": "--hf-checkpoint",
    "tokenizer_worker_num": "",
    "skip_tokenizer_init": "",
    "load_format": "",
    "context_length": "--rollout-max-context-len",
    "quantization": "--rollout-precision",
    "kv_cache_dtype": "--kv-cache-dtype",
    "max_running_requests": "--max-running-requests",
    "random_seed": "--seed",
    "device": "--device",
    "weight_version": "",
    "stream_interval": "",
    "incremental_streaming_output": "",
    "nnodes": "",
    "node_rank": "",
    "dist_init_addr": "",
    "disaggregation_mode": "",
    "custom_sigquit_handler": "",
    "stat_loggers": "",
    "modelopt_quant": "",
}

_SCALARS: dict[str, Any] = {"bool": bool | None, "int": int | None, "float": float | None, "str": str, "json": str}
_LISTS: dict[str, Any] = {f"list[{t.__name__}]": tuple[t, ...] for t in (int, float, str)}  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """SGLang as the rollout engine."""

    url: tuple[str, ...] | None = option(
        None,
        flag="--sglang-url",
        help="use the SGLang servers running at these addresses instead of starting one; or a file with one address per line, which may change "
        "during the run",
        metavar="URL,URL|@FILE",
    )
    weights_dir: str | None = option(
        None,
        flag="--sglang-weights-dir",
        help="directory for weight updates that SGLang reads from files (default: in the run's directory); running servers, which must be able "
        "to read it, otherwise receive weights over HTTP",
        metavar="DIR",
    )
    python_path: str | None = option(
        None,
        flag="--sglang-python-path",
        help="directory with SGLang and the packages that it pins, such as an older Transformers than the run's; it comes first on the import "
        "path of SGLang's processes (several: separated as in PYTHONPATH)",
        metavar="DIR",
    )
    startup_timeout: float = option(
        900.0, flag="--sglang-startup-timeout", help="seconds to wait until SGLang is ready", gt=0
    )


def server_fields() -> list[dict[str, Any]]:
    """Return the server options that users may set, in the format of ``read_server_args.read``."""
    listed: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["fields"]
    return [field for field in listed if field["name"] not in OWN]


def _option(field: dict[str, Any]) -> tuple[str, Any, Any]:
    """Return a dataclass field whose empty default (None, empty string or tuple) means SGLang's default."""
    name, kind = field["name"], field["type"]
    default = f"SGLang's default: {json.dumps(field['default'])}" if "default" in field else "default: SGLang decides"
    made = option(
        {"str": "", "json": ""}.get(kind, () if kind in _LISTS else None),
        flag=f"--sglang-{name.replace('_', '-')}",
        aliases=(f"--sglang-{field['cli']}",) if "cli" in field else (),
        help=f"{name} of SGLang's ServerArgs{', as JSON' if kind == 'json' else ''} ({default})",
        choices=tuple(field.get("choices", ())),
    )
    return name, (_SCALARS | _LISTS)[kind], made


def _set_fields(options: Any, **given: Any) -> None:
    """Constructor of the option group. Compiling the one of ``dataclass``, with hundreds of arguments, would take much of a plan's time."""
    for field in fields(options):
        object.__setattr__(options, field.name, given.pop(field.name, field.default))
    if given:
        raise TypeError(f"there is no option {', '.join(given)}")


#: The option group: the fields of ``EngineOptions``, then every user-settable field of ServerArgs.
SglangConfig: type = make_dataclass(
    "SglangConfig",
    [_option(f) for f in server_fields()],
    bases=(EngineOptions,),
    namespace={"__doc__": EngineOptions.__doc__, "__init__": _set_fields},
    init=False,
    repr=False,  # generating methods of hundreds of fields would slow down every command
    eq=False,
    frozen=True,
    kw_only=True,
)


def server_arguments(options: Any) -> dict[str, Any]:
    """Return the user's ServerArgs by name, without those left at SGLang's default."""
    own = {field.name for field in fields(EngineOptions)}
    kinds = {field["name"]: field["type"] for field in server_fields()}
    found: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in own or value in (None, "", ()):
            continue
        if kinds[field.name] == "json":
            found[field.name] = json.loads(value) if value.lstrip().startswith(("{", "[")) else value
        else:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found
