"""Contract tests for plugins that change the stream of weights that leaves a trainer (``wrap_weights``): weight sync, ``--export-hf``,
snapshots and ``miles convert``.

Subclass the contract and name the plugins and options of a toy run::

    class TestMyAdapters(WeightsContract):
        plugins = ("mine",)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.contracts.emulation import Emulation
from miles_core.contracts.hooks import Purpose
from miles_core.data.sample import Sample
from miles_core.data.weight_unit import WeightUnit
from miles_core.plugin.boundary import compose
from miles_testing.run_contract import RunContract
from miles_testing.toy import ToyRun, toy_arguments

Shapes = list[tuple[str, tuple[int, ...], torch.dtype]]


class WeightsContract(RunContract):
    """Contract tests for ``wrap_weights``.

    Attributes:
        tolerance: largest mean difference of log-probabilities between engine and trainer, in nats per token.
        added: checkpoint names that an export has in addition to those of the checkpoint at the start.
    """

    tolerance = 1e-5
    added: tuple[str, ...] = ()

    def test_the_engine_computes_what_the_trainer_computes(self) -> None:
        for record in self.run(verify_logprobs=True).metrics:
            assert record["verify/abs_log_prob"] < self.tolerance

    def test_an_export_is_a_checkpoint_of_the_trained_model(self, tmp_path: Path) -> None:
        """It has the tensors of the checkpoint at the start, and Transformers computes the trainer's log-probabilities with it."""
        from transformers import AutoModelForCausalLM

        done = self.run(export_hf=tmp_path / "hf")
        start, export = (CheckpointFiles(path).entries for path in (done.run.policy.hf_checkpoint, tmp_path / "hf"))
        assert {n: e.shape for n, e in export.items() if n not in self.added} == {n: e.shape for n, e in start.items()}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", dtype=torch.float32, output_loading_info=True
        )
        model, info = loaded
        assert not info["missing_keys"]
        samples = _samples(done)
        for sample, expected in zip(samples, _rank(done).log_probs(samples), strict=True):
            assert np.abs(_scores(model, sample) - expected).mean() < self.tolerance

    def test_streams_are_repeatable(self) -> None:
        """Names, shapes and order are equal each time; every tensor is sent once, and is finite."""
        rank = _rank(self.whole_run())
        purposes: tuple[Purpose, ...] = ("sync", "export", "snapshot")
        for purpose in purposes:
            stream = partial(rank.units, purpose)
            first = _describe(stream())
            assert first and first == _describe(stream()), f"two streams for the purpose {purpose} differ"
            names = [name for name, _, _ in first]
            assert len({*names}) == len(names), f"a tensor is sent twice for the purpose {purpose}"
            wrong = [n for u in stream() for n, t in u.tensors.items() if not bool(torch.isfinite(t.float()).all())]
            assert not wrong, f"weights that are not finite: {wrong}"

    def test_a_snapshot_holds_the_trained_weights(self) -> None:
        """The trainer computes the same log-probabilities with a snapshot of its weights as with its weights."""
        done = self.whole_run()
        rank, samples = _rank(done), _samples(done)
        expected = rank.log_probs(samples)
        rank.take_snapshot(0)
        for one, two in zip(expected, rank.log_probs(samples, Emulation(snapshot=True)), strict=True):
            assert np.abs(one - two).mean() < self.tolerance

    def test_conversions_are_planned_without_weights(self, tmp_path: Path) -> None:
        """For ``miles convert`` the stream on the meta device has the names, shapes and dtypes of the stream with weights."""
        from miles_core.config.load import load
        from miles_core.run.make import make_run
        from miles_core.run.prepare import apply_plan, prepare

        config = load(toy_arguments(list(self.plugins), tmp_path / "run", **self.options))
        accepted, catalogue = prepare(config)
        run = make_run(apply_plan(config, accepted), accepted, catalogue, tmp_path)
        files = CheckpointFiles(run.policy.hf_checkpoint)
        found = []
        for device in ("meta", "cpu"):
            chain = run.hooks.chain("wrap_weights", run=run, policy=run.policy, purpose="convert")
            found.append(_describe(compose(partial(_read, files, device), chain)()))
        assert found[0] and found[0] == found[1]


def _rank(done: ToyRun) -> Any:
    """Return the trainer rank of a run's first policy."""
    learner: Any = done.parts[0].learner
    return learner.rank


def _samples(done: ToyRun) -> list[Sample]:
    """Samples of the last step, without recorded fields."""
    last = [s for s in done.samples if s["step"] == max(other["step"] for other in done.samples)]
    return [Sample(tokens=s["tokens"], response_length=s["response_length"], index=s["index"]) for s in last[:4]]


def _scores(model: Any, sample: Sample) -> np.ndarray:
    """Log-probabilities of a sample's response tokens under a Transformers model, [response_length]."""
    tokens = torch.tensor([list(sample.tokens)])
    with torch.no_grad():
        log_probs = model(tokens).logits.float().log_softmax(-1)[0, :-1]
    chosen: Tensor = log_probs.gather(1, tokens[0, 1:, None])[-sample.response_length :, 0]
    return chosen.numpy()


def _describe(stream: Iterator[WeightUnit]) -> Shapes:
    return [(name, tuple(tensor.shape), tensor.dtype) for unit in stream for name, tensor in unit.tensors.items()]


def _read(files: CheckpointFiles, device: str) -> Iterator[WeightUnit]:
    """Yield the tensors of a checkpoint, one per unit; on the meta device without reading them."""
    for name, entry in files.entries.items():
        shape, dtype = entry.shape, entry.dtype
        yield WeightUnit(
            {name: torch.empty(shape, dtype=dtype, device="meta") if device == "meta" else files.read(name, None)}
        )
