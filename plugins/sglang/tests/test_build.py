"""How a run makes the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from miles_core.config.load import load
from miles_formats import Codec
from miles_sglang import build


@pytest.mark.parametrize(("worker", "below"), [("", "sglang"), ("engine-1", "sglang/engine-1")])
def test_the_engines_of_a_run_do_not_share_files(monkeypatch, tmp_path, worker, below):
    monkeypatch.setattr("miles_workers.output._worker", worker)
    monkeypatch.setattr(build, "make_codec", lambda run, policy, precision="bf16": Codec())
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(
        build,
        "assemble",
        lambda checkpoint, codec, detokenize, directory, choices, early, codec_of, processor, shared: directory,
    )
    config = load(["--hf-checkpoint", str(tmp_path), "--engine", "sglang", "--device", "cpu"])
    run = SimpleNamespace(
        config=config, config_of=lambda policy: config, fields=(), tokenizer=None, directory=tmp_path, state={}
    )
    run.plan = SimpleNamespace(holds=lambda expression: False)
    assert build.make_engine(run, SimpleNamespace(hf_checkpoint=str(tmp_path))) == tmp_path / below
