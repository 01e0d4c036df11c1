"""The options of sglang: its own, and one for each option of SGLang's server (``server_args.json``)."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

from miles_core.plugin import option
from miles_sglang.read_server_args import TABLE

#: What the engine itself says to SGLang: from core's option, or because the contract needs it so.
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

    url: str | None = option(
        None,
        flag="--sglang-url",
        help="use the SGLang server that runs at this address instead of starting one; weights go to it through a directory "
        "that both can read (--sglang-weights-dir)",
        metavar="URL",
    )
    weights_dir: str | None = option(
        None,
        flag="--sglang-weights-dir",
        help="where weights are written for SGLang to read, when they go by file (default: in the run's directory)",
        metavar="DIR",
    )
    startup_timeout: float = option(
        900.0, flag="--sglang-startup-timeout", help="seconds that SGLang may take to come up", gt=0
    )


def server_fields() -> list[dict[str, Any]]:
    """The options of SGLang's server that users may set; see ``read_server_args.read``."""
    listed: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["fields"]
    return [field for field in listed if field["name"] not in OWN]


def described_version() -> str:
    """The version of SGLang that the options are of."""
    return str(json.loads(TABLE.read_text(encoding="utf-8"))["sglang"])


def _option(field: dict[str, Any]) -> tuple[str, Any, Any]:
    """A dataclass field whose default stands for SGLang's own: none, or nothing in a text or a list."""
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


#: The option group: what is written above, then every field of ServerArgs.
SglangConfig: type = make_dataclass(
    "SglangConfig", [_option(f) for f in server_fields()], bases=(EngineOptions,), frozen=True, kw_only=True
)
SglangConfig.__doc__ = EngineOptions.__doc__


def given_arguments(options: Any) -> dict[str, Any]:
    """The arguments of SGLang's server that were given, by name: what keeps SGLang's default is left out."""
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
