"""Kernels that compute rows write their codes: the bytes of a launch of its own, and the same answers of an engine with fewer launches."""

import asyncio
import copy
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from miles_core.engine import Request, Sampling
from miles_embedded import load_model
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.views import export
from miles_formats import FormatCodec, Products
from miles_fp8.format import Fp8
from miles_fp8.product import Fp8Product
from miles_fp8.row_cache import QuantizedRowCache
from miles_testing import tiny_checkpoint

KERNELS = Path(__file__).with_name("row_kernels.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs the kernel here")
def test_kernels_in_the_interpreter_write_the_codes_of_a_launch():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, str(KERNELS)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@torch.no_grad()
def test_codes_are_kept_for_the_memory_of_their_rows():
    kept, rows, codes = QuantizedRowCache(), torch.randn(1, 6, 32), (torch.zeros(8, 32), torch.zeros(8, 1))
    kept.put(rows, codes, 2)
    assert kept.take(rows.clone().view(6, 32)) is None  # as a hook may return
    assert kept.take(rows.view(12, 16)) is None and kept.take(rows[0, :4]) is None
    assert copy.deepcopy(kept).take(rows.view(6, 32)) is None
    assert kept.take(rows.view(6, 32)) is codes and kept.take(rows[0]) is codes
    assert kept.take(rows[0]) is None  # two products have read them
    kept.put(rows, codes, 1)
    rows.mul_(2)
    assert kept.take(rows[0]) is None
    with torch.inference_mode():
        inference = torch.randn(6, 32)
    kept.put(inference, codes, 1)
    assert kept.take(inference) is None


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a GPU of sm_90"
)
class TestOnTheGpu:
    @pytest.mark.parametrize("power_of_two", [False, True])
    def test_kernels_write_the_codes_of_a_launch(self, power_of_two, monkeypatch):
        monkeypatch.syspath_prepend(KERNELS.parent)
        import row_kernels

        for dim in (64, 144, 1024, 1536, 4096):
            for rows in (17, 64, 130, 255, 512):
                row_kernels.compare_norm(rows, dim, power_of_two)
                row_kernels.compare_gate(rows, dim, power_of_two)
        for rows in (20, 64, 256):
            row_kernels.compare_attention(rows, 4, 128, power_of_two)

    @pytest.mark.parametrize("fixed_order", [False, True])
    @pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
    def test_an_engine_answers_alike_with_fewer_launches(self, tmp_path, monkeypatch, family, fixed_order):
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 512, "head_dim": 128}
        # two query heads: their output has as many columns as the model
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        path = tiny_checkpoint(family, tmp_path, num_hidden_layers=4, **sizes, **heads)
        codec, trainer = FormatCodec(Fp8(fixed_order=fixed_order)), load_model(path, "bfloat16", "cuda")

        def answer():
            """Return answers after two updates, scores, and the launches of one decode step that only quantise."""
            settings = Settings(str, codec=codec, products=Products("native"))
            engine, found = EmbeddedEngine(load_model(path, "bfloat16", "cuda"), settings), []
            for version in (0, 1):
                asyncio.run(engine.update_weights(codec.encode(export(trainer)), version))
                found.append(asyncio.run(ask(engine)))
            scores = [s.tolist() for s in asyncio.run(engine.score([list(range(2, 40)), [3, 1, 4]]))]
            return found, scores, count_launches(engine)

        found, scores, few = answer()
        monkeypatch.setattr(Fp8Product, "row_epilogue", lambda *args, **options: None)
        expected, near, many = answer()
        assert found == expected and scores == near
        # of a layer: query/key/value, o, gate/up and down; or query/key/value, o, and the experts' rows and inner rows
        launches = {"qwen3": (0, 16), "qwen3_moe": (4, 16)}[family]
        assert (few["_activation_codes"], many["_activation_codes"]) == launches
        # the kernel that merges parts of a row's keys also writes codes, so it runs for rows that are one part, too
        merged = few["_merge_splits"] - many["_merge_splits"]
        assert sum(many.values()) - sum(few.values()) == launches[1] - launches[0] - merged


async def ask(engine):
    """Tokens and log-probabilities of 37 requests."""
    requests = [Request([5, 6, 7 + i], Sampling(12), key=i) for i in range(37)]
    return [(r.tokens, r.log_probs) for r in await asyncio.gather(*map(engine.generate, requests))]


def count_launches(engine):
    """Launches of one recorded decode step of more than 16 rows, kernel -> number."""
    graphs = engine.async_steps.graphs
    shape = max(graphs._recorded, key=lambda shape: shape.rows)
    assert shape.rows > 16
    assert graphs.ready(shape)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graphs.run(shape)
        torch.cuda.synchronize()
    return Counter(event.name for event in profiler.events() if event.device_type == DeviceType.CUDA)
