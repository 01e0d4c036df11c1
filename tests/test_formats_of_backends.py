"""Every rollout format x training format x engine x trainer of the installed plugins: the start accepts what the plan accepts.

The start compares the quantisers of both sides with the format (``miles_core.mismatch.parity``) and sends the weights. Here the kernels of SGLang and
TransformerEngine are doubles, which compute on a CPU what these libraries compute on a GPU. The adapters around them are real.
"""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch

from miles_core.config.load import load
from miles_core.errors import MilesError
from miles_core.mismatch import parity
from miles_core.plugin.check import check
from miles_core.plugin.discovery import discover
from miles_core.plugin.facts import Fact
from miles_core.run.prepare import facts_for
from miles_embedded import load_model
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.trainer.trainer import EmbeddedTrainer
from miles_formats.convert.installed import format_class
from miles_fp8.format import Fp8
from miles_megatron.trainer import quantizers
from miles_mxfp8.format import Mxfp8
from miles_sglang import worker
from miles_sglang.choices import Choices
from miles_sglang.engine import SglangEngine
from miles_sglang.pool import connect_pool
from miles_testing import tiny_checkpoint
from miles_vllm import review as vllm_review
from miles_vllm.engine import Settings as VllmSettings
from miles_vllm.engine import VllmEngine

#: Plugins that provide a format or a side; others take no part.
CATALOGUE = {
    name: m for name, m in discover().items() if m.standard or m.formats or {"engine", "trainer"} & m.provides.keys()
}
FORMATS = sorted(name for manifest in CATALOGUE.values() for name in manifest.formats)
URL = "http://host:30000"
#: Engines and trainers: name -> facts. A server that the run did not start has no parity, because it quantises nothing on request.
ENGINES = {"embedded": {}, "sglang": {}, "sglang at an address": {"engine": "sglang", "sglang.url": URL}, "vllm": {}}
TRAINERS = ("embedded", "megatron")
#: Whole tiles of every format.
SIZES = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def test_every_installed_backend_is_walked():
    named = {
        kind: {name for m in CATALOGUE.values() for name in m.provides.get(kind, ())} for kind in ("engine", "trainer")
    }
    assert named["engine"] <= ENGINES.keys() and named["trainer"] <= set(TRAINERS)
    assert {"fp8", "int4", "mxfp8", "nvfp4"} <= set(FORMATS)


class Kernels:
    """SGLang in a process that this run started. Quantises in the worker's code."""

    same_host = True

    async def restart(self, changes):
        return {}

    def quantize(self, format, shape, numbers):
        return worker._quantize(format, list(shape), numbers)


def quantise_groups(x, size):
    """SGLang's FP8 kernel: it multiplies by the reciprocal of the scale."""
    groups = x.float().unflatten(-1, (-1, size))
    scales = groups.abs().amax(-1).clamp(min=1e-10) / 448
    codes = (groups * (1 / scales)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scales


class Stored:
    """A tensor of TransformerEngine."""

    def __init__(self, format, x, weights):
        codes, scales = format.quantize(x.float()).values()
        self._rowwise_data, self._rowwise_scale_inv = codes.view(torch.uint8), scales
        self._values = format.dequantize(format.quantize(x.float())) if weights else format.fake_quantize_activation(x)

    def dequantize(self, dtype):
        return self._values.to(dtype)


@pytest.fixture
def kernels(monkeypatch):
    """Doubles of the libraries on a machine with a GPU."""
    modules = {
        "sglang.kernels.ops.quantization.fp8_kernel": {"sglang_per_token_group_quant_fp8": quantise_groups},
        "sglang.srt.layers.quantization.fp8_utils": {"mxfp8_group_quantize": lambda x: Mxfp8().quantize(x).values()},
    }
    for name, content in modules.items():
        for parent in [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)]:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    for kind, format in ((quantizers.Blocks, Fp8()), (quantizers.Microscaling, Mxfp8())):
        double = lambda self, weights, format=format: lambda x: Stored(format, x, weights)  # noqa: E731
        monkeypatch.setattr(kind, "_quantizer", double)
    monkeypatch.setattr(
        quantizers, "torch", SimpleNamespace(**{**vars(torch), "cuda": SimpleNamespace(is_available=lambda: True)})
    )
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)


@pytest.fixture
def starts(kernels, tmp_path):
    """(kind, backend, format) -> the reason for which the start would stop; empty if it would not."""
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "model", **SIZES)
    model = load_model(str(checkpoint))
    engine = EmbeddedEngine(model, Settings(str, eos=[]))
    trainer = SimpleNamespace(model=model, precision=None)
    served = SimpleNamespace(
        capabilities=frozenset(),
        weights_dir=tmp_path,
        served=None,
        over_http=False,
        restarts=None,
        translator=SimpleNamespace(max_context=64),
        allow_mismatch=False,
    )
    vllm = VllmSettings(SimpleNamespace(max_context=64), {}, frozenset())
    engines = {
        "embedded": engine,
        "sglang": SglangEngine(Kernels(), served),
        "sglang at an address": SglangEngine(connect_pool(Choices(url=(URL,)), SimpleNamespace()), served),
        "vllm": VllmEngine(SimpleNamespace(), vllm),
    }
    trainers = {
        "embedded": lambda format: EmbeddedTrainer.quantizer(trainer, format),
        "megatron": quantizers.make_quantizer,
    }

    @cache
    def start(kind, backend, name):
        if name == "bf16":
            return ""
        format = format_class(name).from_config(load(["--hf-checkpoint", str(checkpoint)]))
        quantizer = engines[backend].quantizer if kind == "engine" else trainers[backend]
        try:
            parity.check(f"{kind} {backend}", format, quantizer(format))
            if kind == "engine" and engines[backend].hot_update(name) == "restart":  # the first weight sync
                asyncio.run(engines[backend].link.restart({}))
        except MilesError as error:
            return str(error)
        return ""

    start.checkpoint = checkpoint
    return start


def test_the_start_accepts_what_the_plan_accepts(starts, monkeypatch):
    """... and a side that the plan refuses for its format would stop the start."""
    monkeypatch.setattr(vllm_review, "version", lambda: "0.32.0")
    host = facts_for(load(["--hf-checkpoint", str(starts.checkpoint)]), ["hardware=8xB200"])
    accepted = set()
    for rollout, train, engine, trainer in product(("bf16", *FORMATS), ("bf16", *FORMATS), ENGINES, TRAINERS):
        chosen = {"rollout.precision": rollout, "train.precision": train, "engine": engine, "trainer": trainer}
        chosen |= ENGINES[engine]
        given = (Fact(name, value, f"--{name} {value}", chosen=True) for name, value in chosen.items())
        problems = check({}, CATALOGUE, host.with_facts(given)).problems
        sides = {
            f"rollout.precision {rollout}": ("engine", engine, rollout),
            f"train.precision {train}": ("trainer", trainer, train),
        }
        case = f"{rollout} on {engine} x {train} on {trainer}"
        for side in () if problems else sides.values():
            assert not starts(*side), f"the plan accepts {case}, and the start stops: {starts(*side)}"
        for problem in (p for p in problems if p.who in sides):
            assert starts(*sides[problem.who]), (
                f"the plan refuses {case} ({problem.headline}), and the start would accept it"
            )
        if not problems:
            accepted.add((rollout, train, engine, trainer))
    on_sglang = {(rollout, train) for rollout, train, engine, trainer in accepted if engine == "sglang"}
    assert on_sglang == {
        ("bf16", "bf16"),
        *product(("fp8",), ("bf16", "fp8")),
        *product(("mxfp8",), ("bf16", "mxfp8")),
        *product(("int4",), ("bf16", "int4")),
    }
    assert {rollout for rollout, _, engine, _ in accepted if engine == "vllm"} == {"bf16"}
    assert {row[:2] for row in accepted if row[2:] == ("embedded", "embedded")} >= {*on_sglang, ("nvfp4", "nvfp4")}
    assert ("mxfp8", "mxfp8", "sglang", "megatron") in accepted and not any(
        "nvfp4" in row and "megatron" in row for row in accepted
    )
