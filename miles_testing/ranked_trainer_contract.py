"""Contract tests for trainers with several ranks: they must compute the same as one process.

    class TestMyTrainerOnRanks(RankedTrainerContract):
        def make(self, checkpoint, setup):
            return MyTrainer(checkpoint, **vars(setup))

Its methods run in other processes (``miles_testing.ranks``), so define the class at the top level of its module, without state in
instances. The part of one process's samples that a rank has is its *share*; every test has ranks with unequal shares.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_core.contracts.trainer import Callbacks, Context, Loss, Output, Trainer
from miles_core.data.batch import Batch, add, collate
from miles_core.errors import MilesError
from miles_testing.ranks import Ranks
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import Setup, copy_weights, make_batch, weighted

__all__ = ["RankedTrainerContract"]

Share = list[int]
WHOLE: Share = list(range(12))
#: Shares of two ranks: unequal ones with several groups, and one without samples.
SHARES: dict[str, list[Share]] = {"unequal": [WHOLE[:11], WHOLE[11:]], "empty": [[], WHOLE]}


class RankedTrainerContract:
    """Subclass it and implement ``make``.

    Attributes:
        family: model family of ``miles_testing.tiny.FAMILIES``.
        atol: tolerance of log-probabilities, and of weights after steps of 1e-2, compared with one process.
    """

    family = "qwen3_moe"
    atol = 5e-5

    def make(self, checkpoint: Path, setup: Setup) -> Trainer:
        """Make a float32 trainer of ``checkpoint`` whose reference model is the same checkpoint: a data-parallel rank of
        torch.distributed's default group, or the only rank if there is no group."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny random checkpoint."""
        return tiny_checkpoint(self.family, tmp_path_factory.mktemp("ranks") / "checkpoint")

    @pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
    def test_ranks_compute_what_one_process_computes(self, ranks: Ranks, checkpoint: Path, shares: list[Share]) -> None:
        one = self.run_steps(checkpoint, WHOLE)
        found = ranks.run(self.run_steps, checkpoint, each=[(share,) for share in shares])
        for share, result in zip(shares, found, strict=True):
            for name, column in one["columns"].items():
                torch.testing.assert_close(result["columns"][name], _select(column, share), rtol=0, atol=self.atol)
        metrics: dict[str, tuple[float, float]] = {}
        for result in found:
            add(metrics, result["metrics"])
        assert metrics.keys() == one["metrics"].keys()
        for name, (total, weight) in one["metrics"].items():
            assert metrics[name][0] / metrics[name][1] == pytest.approx(total / weight, rel=1e-4, abs=1e-6), name
        assert metrics["sum"][1] == one["metrics"]["sum"][1]
        self.check_same(_join(r["weights"] for r in found), one["weights"], self.atol)
        assert [r["sum"] for r in found] == [3.0, 3.0]

    def test_each_unit_comes_from_one_rank_or_from_each(self, ranks: Ranks, checkpoint: Path, tmp_path: Path) -> None:
        one = self.run_export(checkpoint, tmp_path / "one")
        found = ranks.run(self.run_export, checkpoint, tmp_path / "two")
        self.check_same(_join(r["units"] for r in found), one["units"], 0.0)
        for result in found:
            self.check_same(result["everywhere"], one["everywhere"], 0.0)
        written, expected = (tmp_path / name / "model.safetensors" for name in ("two", "one"))
        assert written.read_bytes() == expected.read_bytes()

    def test_saved_on_two_ranks_and_loaded_on_one_two_and_three(
        self, ranks: Ranks, checkpoint: Path, tmp_path: Path
    ) -> None:
        saved, unequal = tmp_path / "saved", SHARES["unequal"]
        went_on = ranks.run(self.run_and_save, checkpoint, saved, each=[(share,) for share in unequal])
        resumed = ranks.run(self.run_resumed, checkpoint, saved, each=[(share,) for share in unequal])
        assert [r["random"] for r in resumed] == [r["random"] for r in went_on]
        assert went_on[0]["random"] != went_on[1]["random"]
        at, after = _join(r["at"] for r in went_on), _join(r["after"] for r in went_on)
        self.check_same(_join(r["after"] for r in resumed), after, 0.0)
        for found in (
            [self.run_resumed(checkpoint, saved, WHOLE)],
            ranks.run(self.run_resumed, checkpoint, saved, size=3, each=[(WHOLE[:7],), ([],), (WHOLE[7:],)]),
        ):
            self.check_same(_join(r["at"] for r in found), at, 0.0)
            self.check_same(_join(r["after"] for r in found), after, self.atol)

    def test_a_bad_gradient_on_one_rank_stops_them_all_before_anything_changes(
        self, ranks: Ranks, checkpoint: Path
    ) -> None:
        for message, unchanged in ranks.run(
            self.run_failing, checkpoint, each=[(share,) for share in SHARES["unequal"]]
        ):
            assert "gradient norm" in message and unchanged

    # -- on each rank -----------------------------------------------------------------------------------------------------

    def run_steps(self, checkpoint: Path, share: Share) -> dict[str, Any]:
        """Run two steps, and passes of every kind."""
        trainer, batch = self.make_rank(checkpoint, Setup(micro_batch_size=3, clip_grad=0.5)), part(share)
        columns = {f"first {n}": c for n, c in trainer.log_probs(batch, "old", entropy=True).items()}
        metrics: dict[str, tuple[float, float]] = {}
        for _ in range(2):
            add(metrics, trainer.step(batch))
        columns |= {kind: trainer.log_probs(batch, kind)["log_probs"] for kind in ("old", "ref")}
        columns |= {"second": trainer.log_probs(batch, "verify")["log_probs"]}
        return {
            "columns": columns,
            "metrics": metrics,
            "weights": copy_weights(trainer),
            "sum": float(trainer.sum(torch.tensor(trainer.world.rank + 1.0))),
        }

    def run_export(self, checkpoint: Path, directory: Path) -> dict[str, dict[str, Tensor]]:
        """Export, and return the units with and without ``everywhere``."""
        trainer = self.make_rank(checkpoint, Setup())
        trainer.export(directory, None)
        everywhere = {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}
        units = copy_weights(trainer)
        assert bool(units) == trainer.world.sends, "World.sends: whether units() yields weights on this rank"
        return {"units": units, "everywhere": everywhere}

    def run_and_save(self, checkpoint: Path, directory: Path, share: Share) -> dict[str, Any]:
        """Run a step, save, and run another step."""
        trainer = self.make_rank(checkpoint, Setup())
        torch.manual_seed(trainer.world.rank)
        trainer.step(part(share))
        trainer.save(directory)
        return self._run_next(trainer, share)

    def run_resumed(self, checkpoint: Path, directory: Path, share: Share) -> dict[str, Any]:
        """Load the saved state into a trainer that made other steps, and run the same next step."""
        trainer = self.make_rank(checkpoint, Setup())
        trainer.step(part(share))
        trainer.load(directory)
        return self._run_next(trainer, share)

    def _run_next(self, trainer: Trainer, share: Share) -> dict[str, Any]:
        at, number = copy_weights(trainer), float(torch.rand(()))
        trainer.step(part(share))
        return {"at": at, "random": number, "after": copy_weights(trainer)}

    def run_failing(self, checkpoint: Path, share: Share) -> tuple[str, bool]:
        """Run a step whose gradient is not finite on one rank; returns the error, and whether the weights are unchanged."""

        def poisoned(output: Output, micro: Batch, ctx: Context) -> Loss:
            assert output.log_probs is not None
            return Loss(output.log_probs.sum() * (math.nan if 11 in micro.index.tolist() else 1.0))

        trainer, batch = self.make_rank(checkpoint, Setup()), part(share)
        before = copy_weights(trainer)
        with pytest.raises(MilesError) as caught:
            trainer.step(batch, loss=poisoned)
        unchanged = all(torch.equal(before[n], t) for n, t in copy_weights(trainer).items())
        trainer.step(batch)  # the failed step must not affect the next one
        return str(caught.value), unchanged

    def make_rank(self, checkpoint: Path, setup: Setup) -> Trainer:
        """Make a trainer and bind its callbacks."""
        trainer = self.make(checkpoint, setup)
        trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
        return trainer

    def check_same(self, found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
        """Check that names are equal, and values equal within ``atol``."""
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            worst = (found[name].double() - tensor.double()).abs().max()
            assert worst <= atol, f"{name} differs by up to {worst:.3g}"


def part(share: Share) -> Batch:
    """Return the batch of a rank's share; for an empty share the result of ``collate`` without samples."""
    batch = make_batch()
    if share:
        return batch.select(share)
    nothing = collate([])
    return replace(nothing, columns=nothing.columns | {"weight": torch.zeros(0)})


def _select(column: Tensor, share: Share) -> Tensor:
    """Select the rows of a share's samples."""
    batch = make_batch()
    batch.columns["selected"] = column
    return batch.select(share).column("selected")


def _join(parts: Any) -> dict[str, Tensor]:
    """Join the tensors of all ranks; checks that no name occurs twice."""
    joined: dict[str, Tensor] = {}
    for found in parts:
        assert not joined.keys() & found.keys()
        joined |= found
    return joined
