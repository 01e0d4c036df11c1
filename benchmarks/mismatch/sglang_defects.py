"""Planted defects in a real SGLang: does a run notice that SGLang computes something else, and does it let a sound SGLang pass?

Each setting is a process with one SGLang and the trainer of a run, with a random BF16 model of four layers. A defect is planted in SGLang's
model inside its schedulers (``sglang_planted.py``), in the weights that are sent, or in the requests; then the weights are sent and both
sides are compared as a run does before its first step (``miles_core.mismatch.first_sync``). Sound starts use other random weights each.
Settings with CUDA graphs have no defects of SGLang's model, because graphs keep what they captured.

``found``: the beginning of the sentence that stopped the run, empty where the defect passed. The exit code is 1 when a defect passed or a
sound start was stopped. ``invisible`` defects are below the rounding errors of BF16 (``docs/mismatch.md``) and are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import sglang_plugin
from benchmarks.engine.checkpoints import VOCABULARY, word_tokenizer
from benchmarks.measure import ROOT, finish, installed, options
from benchmarks.scale import checkout

#: Name of a tensor, the tensor, and all that are sent -> what is sent instead.
Change = Callable[[str, Tensor, Mapping[str, Tensor]], Tensor]

_SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
_COMMON = {
    **{"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 1},
    **{"pad_token_id": 0, "tie_word_embeddings": False, "dtype": "bfloat16", **_SIZES},
}
#: What differs on a CPU, where a rehearsal takes minutes.
_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "vocab_size": 2000,
    "moe_intermediate_size": 128,
}
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True}
_GROUPED = {"n_routed_experts": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
#: Family -> configuration class and its arguments.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", _COMMON),
    "qwen3": ("Qwen3Config", {**_COMMON, "head_dim": 128}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_COMMON, **_EXPERTS, "head_dim": 128, "num_experts": 32}),
    "glm4_moe": ("Glm4MoeConfig", {**_COMMON, **_EXPERTS, **_GROUPED, "head_dim": 128}),
}
#: Setting -> family, whether SGLang captures CUDA graphs, and flags of the run.
SETTINGS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "qwen2": ("qwen2", False, {}),
    "qwen3_moe": ("qwen3_moe", False, {}),
    "glm4_moe": ("glm4_moe", False, {"sglang_disable_shared_experts_fusion": True}),
    "qwen3, graphs, temperature .7": ("qwen3", True, {"rollout_temperature": 0.7}),
    "qwen3_moe, graphs": ("qwen3_moe", True, {}),
}


def of(part: str, change: Callable[[Tensor], Tensor], layer: int | None = None) -> Change:
    """Change the tensors whose name contains ``part``, in one layer or in all."""

    def changed(name: str, tensor: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
        return change(tensor) if part in name and (layer is None or f"layers.{layer}." in name) else tensor

    return changed


def _noisy(tensor: Tensor) -> Tensor:
    return tensor * (1 + 0.01 * torch.randn_like(tensor))


def _swapped(first: str, second: str) -> Change:
    """Exchange two tensors of layer 1."""

    def changed(name: str, tensor: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
        other = name.replace(first, "?").replace(second, first).replace("?", second)
        return sent[other] if "layers.1." in name else tensor

    return changed


def _rolled(tensor: Tensor) -> Tensor:
    half = len(tensor) // 2
    return torch.cat([tensor[:half], tensor[half:].roll(1, 0)])


_ONES, _ZEROS, _TENTH = torch.ones_like, torch.zeros_like, partial(torch.mul, other=1.1)
#: Defects of the weights that are sent.
WEIGHTS: dict[str, Change] = {
    "weights of one layer 1 % off": of("layers.1.", _noisy),
    "norm without its factors": of("input_layernorm", _ONES, 1),
    "value bias left out in one layer": of("v_proj.bias", _ZEROS, 0),
    "query bias left out in one layer": of("q_proj.bias", _ZEROS, 1),
    "shifted rows of the output layer": of("lm_head", _rolled),
    "keys in FP8": of("k_proj.weight", lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
    "experts x 1.1": of(".down_proj.weight", _TENTH),
    "router bias left out": of("e_score_correction_bias", _ZEROS),
    "shared expert left out": of("shared_experts.down_proj", _ZEROS),
    "gate and up swapped in one layer": _swapped("gate_proj", "up_proj"),
    "two experts swapped in one layer": _swapped("experts.0.", "experts.1."),
}
#: Defects of requests: sampling parameters that SGLang gets besides, or instead of, the run's.
REQUESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "temperature applied twice": lambda s: {"temperature": s["temperature"] ** 2},
    "temperature ignored": lambda s: {"temperature": 1.0},
    "temperature x 1.1": lambda s: {"temperature": s["temperature"] * 1.1},
    "one token's logit + 5": lambda s: {"logit_bias": {"9": 5.0}},
    "repetition penalty 1.1": lambda s: {"repetition_penalty": 1.1},
    "improbable tokens cut off": lambda s: {"min_p": 0.1},
    "top-k 50": lambda s: {"top_k": 50},
}
#: Too small to see in BF16, or in the logits of a random model.
INVISIBLE = ("keys in FP8", "one token's logit + 5")
#: Part of a family's weights or modules that a defect needs -> the families that have it.
NEEDS = {
    "bias left out in one layer": ("qwen2",),
    "expert": ("qwen3_moe", "glm4_moe"),
    "top-k weights": ("qwen3_moe", "glm4_moe"),
    "router bias": ("glm4_moe",),
    "shared expert": ("glm4_moe",),
}


def applies(name: str, family: str, temperature: float) -> bool:
    """Whether a defect changes anything here."""
    if name.startswith("temperature") and (temperature == 1) != (name == "temperature x 1.1"):
        return False
    return all(family in families for part, families in NEEDS.items() if part in name)


def randomize(model: Any, seed: int) -> None:
    """Give a model other weights, in place: matrices of 1 to 1.5 over the root of their inputs, norms and biases that matter."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    gain = 1.0 + 0.5 * (seed % 2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            fresh = noise * gain / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.3 * noise
            parameter.copy_(fresh)
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, device=parameter.device))


def byte_tokenizer(vocabulary: int) -> Any:
    """One id a byte. Transformers loads a Qwen2 checkpoint's tokenizer as byte-level BPE, whatever the file says."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<|endoftext|>", "<eos>", *pre_tokenizers.ByteLevel.alphabet()]
    names += [f"w{i}" for i in range(len(names), vocabulary)]
    letters = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>", pad_token="<|endoftext|>")


def save(family: str, directory: Path) -> Path:
    """A random checkpoint with a tokenizer, and prompts."""
    import transformers

    name, values = FAMILIES[family]
    if not torch.cuda.is_available():
        values = values | {key: value for key, value in _SMALL.items() if key in values}
    config = getattr(transformers, name)(**values)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomize(model, 0)
    model.save_pretrained(directory / "model")
    tokenizer = byte_tokenizer if family == "qwen2" else word_tokenizer
    tokenizer(config.vocab_size).save_pretrained(directory / "model")
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(2, config.vocab_size, (8, 24), generator=draw).tolist()
    lines = [json.dumps({"input": " ".join(f"w{t}" for t in row), "label": "a"}) for row in rows]
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "reward.py").write_text("async def rm(args, sample):\n    return 0.0\n")
    return directory / "model"


def flags_of(setting: str, work: Path) -> list[str]:
    """The command line of the run."""
    family, graphs, more = SETTINGS[setting]
    cuda = torch.cuda.is_available()
    flags: dict[str, Any] = {
        **{"hf_checkpoint": save(family, work), "prompt_data": work / "prompts.jsonl"},
        **{"custom_rm_path": f"{work / 'reward.py'}:rm", "engine": "sglang", "save": work / "run"},
        **{"rollout_batch_size": 2, "n_samples_per_prompt": 4, "num_rollout": 1, "rollout_max_response_len": 64},
        **{"rollout_max_context_len": 2048, "max_running_requests": 64, "lr": 1e-6, "log_level": "warning"},
        **{"sglang_max_total_tokens": 65536 if cuda else 8192, "dtype": "bfloat16", **more},
    }
    if cuda:
        flags |= {"sglang_attention_backend": "triton", "sglang_sampling_backend": "pytorch"}
        flags |= {"sglang_moe_runner_backend": "triton", "sglang_mem_fraction_static": 0.6}
        flags |= {} if graphs else {"sglang_disable_cuda_graph": True}
    else:
        flags |= {"device": "cpu"}
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words


class Setting:
    """One SGLang and the trainer of a run; defects are planted in it one after another."""

    def __init__(self, run: Any, parts: Any) -> None:
        self.run, self.parts = run, parts
        self.version, self.seconds = -1, list[float]()
        self.change: Change | None = None
        self.sampling: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        self._planted = ""

    @contextmanager
    def intercept(self) -> Iterator[None]:
        """Let ``change`` and ``sampling`` take effect."""
        from dataclasses import replace

        from miles_sglang.engine import SglangEngine
        from miles_sglang.responses import Translator

        load, sampling = SglangEngine._load, Translator._sampling

        async def loaded(engine: Any, units: Any, version: int) -> None:
            change = self.change
            if change is not None:
                kept = [replace(u, parts={n: t.clone() for n, t in u.parts.items()}) for u in units]
                sent = {n: t for u in kept for n, t in u.parts.items()}
                units = (replace(u, parts={n: change(n, t, sent) for n, t in u.parts.items()}) for u in kept)
            await load(engine, units, version)

        def change(translator: Any, request: Any, most: int) -> dict[str, Any]:
            found = sampling(translator, request, most)
            return {**found, **self.sampling(found)} if self.sampling else found

        SglangEngine._load, Translator._sampling = loaded, change  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            SglangEngine._load, Translator._sampling = load, sampling  # type: ignore[method-assign]

    async def plant(self, name: str) -> None:
        """Plant a defect of SGLang's model; none if the name is empty."""
        if name != self._planted:
            await self.parts.engine.link.call("plant", {"name": name})
            self._planted = name

    async def begin(self) -> str:
        """Send the weights and compare both sides. The sentence that stopped the run; empty if none did."""
        from miles_core.errors import MismatchError, SyncError
        from miles_core.mismatch.first_sync import FirstSync

        self.version += 1
        try:
            self.parts.policy.version = (await self.parts.learner.push(self.version)).version
            started = time.perf_counter()
            await FirstSync(self.run)(self.parts)
            self.seconds.append(time.perf_counter() - started)
        except (MismatchError, SyncError) as error:  # anything else is a mistake of this script
            return str(error)
        return ""


async def measure(setting: str, work: Path, sound: int) -> dict[str, Any]:
    """Everything of one setting."""
    from benchmarks.mismatch import sglang_planted
    from miles_core.config.load import load
    from miles_core.run.make import make_run
    from miles_core.run.parts import build_parts
    from miles_core.run.prepare import apply_plan, prepare
    from miles_sglang import build
    from miles_sglang.process import ProcessLink

    sglang_plugin.register(work / "plugin", "benchmarks.mismatch.sglang_planted")
    build.ProcessLink = partial(ProcessLink, worker="benchmarks.mismatch.sglang_planted")  # type: ignore[assignment, misc]
    family, graphs, more = SETTINGS[setting]
    config = load(flags_of(setting, work))
    plan, catalogue = prepare(config)
    run = make_run(apply_plan(config, plan), plan, catalogue, work / "run")
    temperature, started = more.get("rollout_temperature", 1.0), time.perf_counter()
    result: dict[str, Any] = {"found": {}, "stopped": {}}
    async with build_parts(run) as (made,):
        parts: Any = made
        place = Setting(run, parts)
        with place.intercept():
            result["start"] = round(time.perf_counter() - started, 1)
            for seed in range(sound):
                if seed:
                    randomize(parts.learner.rank.trainer.model, seed)
                if text := await place.begin():
                    result["stopped"][seed] = text
                say(setting, seed=seed, stopped=text, seconds=place.seconds[-1:])
            result["sound"], result["seconds"] = sound, [round(s, 2) for s in place.seconds]
            plants = [] if graphs else list(sglang_planted.PLANTS)
            for name in (*plants, *WEIGHTS, *REQUESTS):
                if not applies(name, family, temperature):
                    continue
                place.change, place.sampling = WEIGHTS.get(name), REQUESTS.get(name)
                await place.plant(name if name in plants else "")
                result["found"][name] = (await place.begin())[:400]
                say(setting, defect=name, found=result["found"][name][:160])
            place.change, place.sampling = None, None
            await place.plant("")
            if text := await place.begin():  # everything was taken back
                result["stopped"]["after the defects"] = text
    return result


def say(setting: str, **what: Any) -> None:
    """Each result as soon as it is there: a time limit may cut the rest."""
    print(json.dumps({"setting": setting, **what}), file=sys.stderr, flush=True)


def run_setting(setting: str, given: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Start a process for the setting; its results, or its error."""
    work = place / "".join(c if c.isalnum() else "-" for c in setting)
    work.mkdir()
    command = [sys.executable, __file__, "--worker", setting, "--work", str(work), "--sound", str(given.sound)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command, env=environment, timeout=given.limit, check=False)
        ended = f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"no result in {given.limit:g} s"
    if (work / "result.json").exists():
        return dict(json.loads((work / "result.json").read_text()))
    log = work / "run" / "sglang" / "sglang.log"
    return {"error": ended + ("\n" + log.read_text(errors="replace")[-2500:] if log.exists() else "")}


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--sound", type=int, default=12, help="sound starts of each setting, with other weights each")
    parser.add_argument("--limit", type=float, default=420, help="seconds of a setting")
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        try:
            found = asyncio.run(measure(given.worker, given.work, given.sound))
            (given.work / "result.json").write_text(json.dumps(found))
        except BaseException:
            traceback.print_exc()
            raise
        return 0
    with tempfile.TemporaryDirectory() as directory:
        checkout.register(Path(directory), ["sglang"], ["sglang"])
        with ThreadPoolExecutor(len(given.settings)) as pool:
            rows = dict(
                zip(
                    given.settings,
                    pool.map(lambda setting: run_setting(setting, given, Path(directory)), given.settings),
                    strict=True,
                )
            )
    return summarize(rows, given.save)


def summarize(rows: Mapping[str, Mapping[str, Any]], saved: bool) -> int:
    """Print what was found; 1 if a defect passed, a sound start was stopped, or a setting failed."""
    good = {setting: row for setting, row in rows.items() if "error" not in row}
    counted = {s: {n: text for n, text in row["found"].items() if n not in INVISIBLE} for s, row in good.items()}
    seconds = [s for row in good.values() for s in row["seconds"]]
    result = {
        "found": {s: [sum(map(bool, texts.values())), len(texts)] for s, texts in counted.items()},
        "missed": {s: [n for n, text in texts.items() if not text] for s, texts in counted.items()},
        "sound starts": sum(row["sound"] for row in good.values()),
        "stopped": {s: row["stopped"] for s, row in good.items() if row["stopped"]},
        "seconds of the check, median and largest": [round(statistics.median(seconds), 2), max(seconds)]
        if seconds
        else [],
        "failed": {s: row["error"] for s, row in rows.items() if "error" in row},
    }
    print(json.dumps(result, indent=1), file=sys.stderr, flush=True)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    versions = partial(installed, "torch", "transformers", "sglang")
    finish("sglang_defects", {"gpu": gpu, **result, "settings": rows}, saved, versions)
    return int(bool(any(result["missed"].values()) or result["stopped"] or result["failed"]))


if __name__ == "__main__":
    sys.exit(main())
