"""How a run makes the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from miles_core.config.load import load
from miles_formats import Codec
from miles_sglang import build
from miles_sglang.choices import Choices
from miles_testing import tiny_checkpoint


@pytest.mark.parametrize(("worker", "below"), [("", "sglang"), ("engine-1", "sglang/engine-1")])
def test_the_engines_of_a_run_do_not_share_files(monkeypatch, tmp_path, worker, below):
    monkeypatch.setattr("miles_workers.output._worker", worker)
    monkeypatch.setattr(build, "make_codec", lambda run, policy, precision="bf16": Codec())
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(
        build,
        "assemble",
        lambda checkpoint, codec, detokenize, directory, *_: SimpleNamespace(
            directory=directory, link=SimpleNamespace(news=None)
        ),
    )
    config = load(["--hf-checkpoint", str(tmp_path), "--engine", "sglang", "--device", "cpu"])
    tokenizer = SimpleNamespace(decode=str)
    run = SimpleNamespace(
        config=config, config_of=lambda policy: config, fields=(), tokenizer=tokenizer, directory=tmp_path, state={}
    )
    run.plan = SimpleNamespace(holds=lambda expression: False)
    assert build.make_engine(run, SimpleNamespace(hf_checkpoint=str(tmp_path))).directory == tmp_path / below


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("auto", "cuda", "bfloat16"),
        ("float32", "cuda", "float32"),
        ("float16", "cuda", "float16"),
        ("auto", "cpu", "float32"),
    ],
)
def test_states_of_convolutions_have_the_dtype_of_the_model(monkeypatch, dtype, device, expected):
    found = build._environment(Choices(dtype=dtype, device=device), {})
    assert found["SGLANG_MAMBA_CONV_DTYPE"] == expected
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")
    assert build._environment(Choices(dtype=dtype, device=device), {})["SGLANG_MAMBA_CONV_DTYPE"] == "bfloat16"


def test_the_files_of_updates_are_in_the_directory_of_the_option(tmp_path):
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "model")

    def directory_of(weights_dir):
        choices = Choices(device="cpu", url="http://localhost:1", weights_dir=weights_dir)
        return build.assemble(checkpoint, Codec(), str, tmp_path, choices).settings.weights_dir

    assert directory_of(None) == tmp_path / "weights"
    assert directory_of(tmp_path / "elsewhere") == tmp_path / "elsewhere"
