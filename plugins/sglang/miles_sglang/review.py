"""Plan checks that rules cannot express: the model's architecture, the server address, the draft model, JSON options, and the number of GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from miles_core.plugin import Facts, Problem, Review, describe_fact
from miles_sglang.adapter_layout import ALL_EXPERTS, EXPERT_PARAMETERS, names_experts
from miles_sglang.architectures import load_table
from miles_sglang.config import server_fields
from miles_sglang.division import find_division_problems
from miles_sglang.formats import loads_in_place
from miles_sglang.installed import TESTED, version
from miles_sglang.memory import find_size_problems, server_of
from miles_workers.servers import find_shared_servers, find_url_problems

#: Environment variable with a package whose models SGLang registers next to its own.
_EXTERNAL = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_NAMES = tuple(str(field["name"]) for field in server_fields())

#: Model types whose images SGLang 0.5.17 takes in this form (``multimodal/processors/qwen_vl.py``).
FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
#: Layers that SGLang 0.5.17 joins, and those of them that every adapter of one must include (``srt/lora/lora.py``).
_JOINED = (
    (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"q_proj", "v_proj"})),
    (frozenset({"gate_proj", "up_proj"}), frozenset({"gate_proj"})),
)
#: Runners of experts that add adapters (``srt/lora/layers.py``), and families whose experts have gate and up in alternating rows.
_ADAPTING, _INTERLEAVED = ("triton", "marlin"), ("gpt_oss",)
#: Model type -> why SGLang 0.5.17 cannot take processed images of it.
REFUSED = {
    "glm4v": "SGLang 0.5.17 ignores the sizes of processed images in this family, so its positions would be wrong",
    "mistral3": "SGLang 0.5.17 cannot take processed images in this family: its code reads the sizes of undecoded ones",
}


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Implements ``miles_core.plugin.Plugin.review``."""
    problems = (
        *_architecture(facts, model or {}),
        *_images(facts),
        *_python_path(facts),
        *find_url_problems(facts, "sglang"),
        *find_shared_servers(facts, "sglang"),
        *_draft(facts),
        *_tables(facts),
        *_adapted(facts),
        *_adapted_experts(facts),
        *_gpus(facts),
        *_machines(facts),
        *find_division_problems(facts, model),
        *find_size_problems(facts, model),
    )
    return Review(problems=problems)


def _architecture(facts: Facts, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Report a model that SGLang does not have. SGLang would run Transformers' modules, or fail when it starts if they do not allow that."""
    version, classes = load_table()
    names = [str(name) for name in model.get("architectures") or ()]
    elsewhere = facts.value("sglang.url") or facts.value("engine") != "sglang" or os.environ.get(_EXTERNAL)
    if not names or elsewhere or classes & set(names) or facts.value("sglang.model_impl") == "transformers":
        return
    why = (
        f"SGLang {version} has no model of this architecture and would run Transformers' modules, with which this plugin has not been "
        f"tested; --sglang-model-impl transformers tries it, and {_EXTERNAL} names a package with a model of your own"
    )
    described = ("architectures", ", ".join(names), "config.json")
    choices = ("engine", "sglang.model_impl")
    tries = [{"sglang.model_impl": "transformers"}]
    yield Problem("sglang", "a model that SGLang has", why, (described,), choices=choices, tries=lambda: tries)


def _images(facts: Facts) -> Iterator[Problem]:
    """Report a model whose images SGLang does not accept in the form in which the run passes them."""
    kind = str(facts.value("model.type"))
    if not facts.value("data.media") or facts.value("engine") != "sglang" or kind in FAMILIES:
        return
    why = REFUSED.get(kind, f"the run passes processed images to SGLang for {', '.join(FAMILIES)} only")
    described = (describe_fact(facts.lookup("model.type")), describe_fact(facts.lookup("data.media")))
    yield Problem(
        "sglang",
        "a model whose processed images SGLang takes",
        f"{why}; use --engine embedded",
        described,
        choices=("engine",),
    )


def _adapted(facts: Facts) -> Iterator[Problem]:
    """Report adapters of some parts of a layer that SGLang joins: it rejects them, or computes without them."""
    if facts.value("engine") != "sglang" or facts.value("transport") != "adapter":
        return
    for policy in facts.policies:
        fact = facts.scope(policy).lookup("lora.target_modules")
        names = {name.strip().rpartition(".")[2] for name in str(fact.value).split(",")}
        for parts, needed in _JOINED:
            if names & parts and not needed <= names:
                why = f"SGLang joins these layers and loads no adapter without {' and '.join(sorted(needed))}"
                needs = f"{','.join(sorted(needed))} in --lora-target-modules"
                yield Problem("sglang", needs, why, (describe_fact(fact),), choices=("lora.target_modules",))
                return


def _adapted_experts(facts: Facts) -> Iterator[Problem]:
    """Report adapters of joined experts where SGLang 0.5.17 has no kernels for them, or reads them in another order."""
    if facts.value("engine") != "sglang" or facts.value("transport") != "adapter":
        return
    for policy in facts.policies:
        own = facts.scope(policy)
        names = [name.strip() for name in str(own.value("lora.target_modules")).split(",")]
        if not names_experts(names, bool(own.value("model.moe"))):
            continue
        unknown = [n for n in names if "expert" in n and n.rpartition(".")[2] not in (*EXPERT_PARAMETERS, ALL_EXPERTS)]
        checks = (
            ("lora.target_modules", bool(unknown), f"it adapts the experts' {' and '.join(EXPERT_PARAMETERS)} only"),
            ("model.device", not _has_gpu(own), "its kernels for adapters of experts are written in Triton for GPUs"),
            ("model.type", own.value("model.type") in _INTERLEAVED, "it has gate and up of these experts in turns"),
            (
                "sglang.moe_runner_backend",
                own.value("sglang.moe_runner_backend") not in (None, "", "auto", *_ADAPTING),
                f"of its runners of experts, {' and '.join(_ADAPTING)} add adapters",
            ),
            (
                "sglang.moe_a2a_backend",
                own.value("sglang.moe_a2a_backend") not in (None, "", "none"),
                "these dispatchers pass tokens to runners that add no adapters",
            ),
        )
        for name, wrong, why in checks:
            if wrong:
                needs = "adapters of joined experts that SGLang 0.5.17 can add, or --lora-sync merged"
                described = describe_fact(own.lookup(name)), describe_fact(own.lookup("lora.target_modules"))
                yield Problem("sglang", needs, why, tuple(dict.fromkeys(described)), choices=(name,))


def _has_gpu(facts: Facts) -> bool:
    """Whether SGLang runs on a GPU, as far as the plan knows."""
    return facts.value("model.device") != "cpu" and facts.value("gpu.count") != 0


def _python_path(facts: Facts) -> Iterator[Problem]:
    """Report directories without a tested SGLang."""
    path = facts.value("sglang.python_path")
    if not path or facts.value("engine") != "sglang":
        return
    fact = describe_fact(facts.lookup("sglang.python_path"))
    if facts.value("sglang.url"):
        yield Problem(
            "sglang", "no --sglang-url", "the run then starts no SGLang, and the directory has no effect", (fact,)
        )
        return
    has = version(str(path))
    if has is None or Version(has) not in SpecifierSet(TESTED):
        found = f"it has SGLang {has}" if has else "it has no SGLang"
        why = f"{found}: pip install --target DIR 'sglang{TESTED}'"
        yield Problem("sglang", f"a directory with SGLang {TESTED}", why, (fact,), choices=("sglang.python_path",))


def _gpus(facts: Facts) -> Iterator[Problem]:
    """Report a mismatch between the GPUs that the runtime assigns to an engine and the GPUs that SGLang uses."""
    name = "ray.rollout_num_gpus_per_engine"
    given = facts.value(name) if facts.value("plugin.ray") else None
    server = server_of(facts, 0.0)
    if given is None or facts.value("sglang.url") or facts.value("engine") != "sglang" or server.gpus == given:
        return
    names = ("sglang.tp_size", "sglang.pp_size", name)
    why = "SGLang splits a model across tensor x pipeline ranks and uses one GPU per rank"
    needs = f"--sglang-tp-size x --sglang-pp-size = {given}, the GPUs of an engine"
    values = tuple(describe_fact(facts.lookup(each)) for each in names)
    tries = [{"sglang.tp_size": given // server.pp}] if not given % server.pp else []
    tries.append({name: server.gpus})
    yield Problem("sglang", needs, why, values, choices=names, tries=lambda: tries)


def _machines(facts: Facts) -> Iterator[Problem]:
    """Report an engine on several machines whose number format needs a restart of SGLang for each update, or after the warm-up."""
    given, machine = facts.value("ray.rollout_num_gpus_per_engine"), facts.value("gpu.count")
    if not facts.value("plugin.ray") or not given or not machine or given <= machine:
        return
    if steps := facts.value("precision.warmup_steps"):
        name, why = (
            "precision.warmup_steps",
            "SGLang restarts for the new precision, and an engine on several machines is not restarted",
        )
        values = tuple(
            describe_fact(facts.lookup(each)) for each in (name, "ray.rollout_num_gpus_per_engine", "gpu.count")
        )
        yield Problem("sglang", f"no warm-up of {steps} steps", why, values, choices=(name,), tries=lambda: [{name: 0}])
    if loads_in_place(str(facts.value("rollout.precision") or "")):
        return
    names = ("rollout.precision", "ray.rollout_num_gpus_per_engine", "gpu.count")
    yield Problem(
        "sglang",
        "rollouts in bf16, fp8 or int4",
        "SGLang loads new weights of other formats at its start only, and an engine on several machines is not restarted for each update",
        tuple(describe_fact(facts.lookup(name)) for name in names),
        choices=names[:2],
        tries=lambda: [{"rollout.precision": "fp8"}],
    )


def _draft(facts: Facts) -> Iterator[Problem]:
    """Report a separate draft model with an MTP layer.

    SGLang 0.5.17 loads only the MTP layer of such a model and fails with an assertion about pipelines.
    """
    path = facts.value("sglang.speculative_draft_model_path")
    if not path or facts.value("sglang.speculative_algorithm") != "STANDALONE":
        return
    try:
        config = json.loads((Path(str(path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a model id on a hub, or an error that SGLang reports itself
        return
    if config.get("num_nextn_predict_layers"):
        why = f"{path} has an MTP layer, and SGLang would load only that layer; draft with a checkpoint without one"
        yield Problem(
            "sglang",
            "a draft model without an MTP layer",
            why,
            (describe_fact(facts.lookup("sglang.speculative_draft_model_path")),),
        )


def _tables(facts: Facts) -> Iterator[Problem]:
    """Report options that start like a JSON object but are invalid. SGLang would fail after its start, without naming the option."""
    for fact in [fact for fact in facts.values() if fact.chosen and isinstance(fact.value, str)]:
        table, _, name = fact.name.partition(".")
        if table != "sglang" or name not in _NAMES or not fact.value.lstrip().startswith("{"):
            continue
        try:
            json.loads(fact.value)
        except ValueError as error:
            why = f"SGLang parses this option as a JSON object: {error}; keys and strings must be in double quotes"
            yield Problem("sglang", f"JSON in --sglang-{name.replace('_', '-')}", why, (describe_fact(fact),))
