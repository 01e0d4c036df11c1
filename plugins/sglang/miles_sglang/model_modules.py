"""Leaves out SGLang's modules of other models. A scheduler imports all of them, more than 200, before it loads a model.

SGLang has an environment variable for it. It is set in SGLang's processes only, for language models (``...ForCausalLM``) without drafts: SGLang
renames the architecture of drafts, and its multimodal models look up the language model within them by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Names of modules that are not imported, separated by commas.
VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"
#: Module of models that run Transformers' layers; SGLang uses it for architectures that no other module has.
_FALLBACK = "transformers"


def environment(arguments: Mapping[str, Any], models: Path) -> dict[str, str]:
    """Return the environment variable for SGLang's processes; empty if all modules may be needed, or if the user set the variable.

    Args:
        arguments: arguments of ``ServerArgs``.
        models: SGLang's folder ``srt/models``.
    """
    if VARIABLE in os.environ or arguments.get("speculative_algorithm") or arguments.get("model_impl"):
        return {}
    config = Path(arguments["model_path"]) / "config.json"
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
    if not names or not all(name.endswith("ForCausalLM") for name in names):
        return {}
    unneeded = modules_without(models, names)
    return {VARIABLE: ",".join(unneeded)} if unneeded else {}


def modules_without(models: Path, architectures: list[str]) -> list[str]:
    """Return the names of the modules that do not mention the architectures, sorted; none if no module mentions one of them."""
    mentions = re.compile(rf"\b\w*({'|'.join(map(re.escape, architectures))})\b")
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in models.glob("*.py")}
    kept = {name for name, text in texts.items() if mentions.search(text)}
    return sorted(texts.keys() - kept - {_FALLBACK, "__init__"}) if kept else []
