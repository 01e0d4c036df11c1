"""Contract tests for trainers.

    class TestMyTrainer(TrainerContract):
        def make(self, checkpoint, setup):
            return MyTrainer(checkpoint, **vars(setup))

The reference is Transformers' own model in float64, one sample at a time, with an explicit AdamW. Apply ``RankedTrainerContract`` too to a
trainer with several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Callbacks, Context, Loss, Output, Trainer
from miles_core.data.batch import Batch
from miles_core.data.field import CANDIDATES, SAMPLING_SUPPORT
from miles_core.errors import MilesError
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import (
    Setup,
    adamw,
    checkpoint_weights,
    copy_weights,
    find_needed,
    make_batch,
    position,
    random_support,
    weighted,
    weights,
    yardstick,
    yardstick_model,
)

__all__ = ["Setup", "TrainerContract"]


class TrainerContract:
    """Subclass it and implement ``make``.

    Attributes:
        family: model family of ``miles_testing.tiny.FAMILIES``.
        atol: tolerance of log-probabilities compared with the float64 reference, and of weights after a step, relative to the step.
        frozen: part of the names of weights without a gradient; "" if every weight changes.
    """

    family = "qwen3_moe"
    atol = 2e-4
    frozen = ""

    def make(self, checkpoint: Path, setup: Setup) -> Trainer:
        """Make a float32 trainer of ``checkpoint`` whose reference model is the same checkpoint."""
        raise NotImplementedError

    def active_context(self) -> Callable[[], Context | None] | None:
        """Return a function that returns the context inside a module's forward; None if the trainer provides none."""
        return None

    @pytest.fixture(scope="class")
    def checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny random checkpoint."""
        return tiny_checkpoint(self.family, tmp_path_factory.mktemp("trainer") / "checkpoint")

    @pytest.fixture
    def batch(self) -> Batch:
        """Groups of siblings, prompts and responses of several lengths, some masked tokens, and one sample without training."""
        return make_batch()

    def trainer(self, checkpoint: Path, setup: Setup | None = None, loss: Any = None) -> Trainer:
        """Make a trainer and bind its callbacks."""
        trainer = self.make(checkpoint, setup or Setup())
        trainer.bind(Callbacks(trainer.forward, loss or weighted, trainer.optimizer_step))
        return trainer

    def test_log_probs_are_those_of_the_model(self, checkpoint: Path, batch: Batch) -> None:
        found = self.trainer(checkpoint).log_probs(batch, "old", entropy=True)
        log_probs, entropy = yardstick(yardstick_model(checkpoint), batch, Setup().temperature)
        assert found["log_probs"].dtype == torch.float32
        torch.testing.assert_close(found["log_probs"].double(), log_probs.detach(), rtol=0, atol=self.atol)
        torch.testing.assert_close(found["entropy"].double(), entropy.detach(), rtol=0, atol=self.atol)

    def test_without_being_asked_there_is_no_entropy(self, checkpoint: Path, batch: Batch) -> None:
        assert set(self.trainer(checkpoint).log_probs(batch, "old")) == {"log_probs"}

    def test_a_recorded_support_bounds_the_softmax(self, checkpoint: Path, batch: Batch) -> None:
        batch.columns[SAMPLING_SUPPORT.name] = support = random_support(batch)
        found = self.trainer(checkpoint).log_probs(batch, "old")["log_probs"]
        expected, _ = yardstick(yardstick_model(checkpoint), batch, Setup().temperature, support)
        torch.testing.assert_close(found.double(), expected.detach(), rtol=0, atol=self.atol)

    def test_candidates_are_scored_with_gradient(self, checkpoint: Path, batch: Batch) -> None:
        """With every token a candidate, probabilities add up to 1 and the sampled token has its own log-probability."""
        model: Any = yardstick_model(checkpoint)
        seen: list[Tensor] = []

        def loss(output: Output, micro: Batch, ctx: Context) -> Loss:
            assert output.log_probs is not None and output.candidate_log_probs is not None
            where = micro.mask.bool()
            own = output.candidate_log_probs.gather(1, micro.tokens[:, None])[:, 0]
            seen.append((own[where] - output.log_probs[where]).abs().max().detach())
            seen.append((output.candidate_log_probs[where].exp().sum(-1) - 1).abs().max().detach())
            seen.append(output.candidate_log_probs[~where].abs().sum().detach())
            return Loss((own * micro.column("weight")).sum())

        one, other = self.trainer(checkpoint, loss=loss), self.trainer(checkpoint)
        if "candidates" not in one.capabilities:
            pytest.skip("the trainer does not score candidates")
        tokens = torch.arange(model.config.vocab_size, dtype=torch.int32).repeat(len(batch.tokens), 1)
        one.step(replace(batch, columns=batch.columns | {CANDIDATES.name: tokens}))
        other.step(batch)
        assert seen and max(seen) < self.atol
        self.check_weights(weights(one), weights(other), self.atol)

    def test_a_step_is_one_step_of_adamw(self, checkpoint: Path, batch: Batch) -> None:
        trainer = self.trainer(checkpoint)
        metrics = trainer.step(batch)
        model = yardstick_model(checkpoint)
        log_probs, _ = yardstick(model, batch, Setup().temperature)
        (log_probs * batch.column("weight")).sum().backward()
        norm = adamw(model, Setup())
        assert metrics["train/grad_norm"][0] == pytest.approx(norm, rel=1e-3)
        assert metrics["train/lr"][0] == pytest.approx(Setup().lr)
        assert metrics["sum"] == pytest.approx((float(log_probs.detach().sum()), float(batch.mask.sum())), rel=1e-4)
        self.check_weights(weights(trainer), checkpoint_weights(model, checkpoint), self.atol)

    def test_gradients_are_held_across_calls(self, checkpoint: Path, batch: Batch) -> None:
        one, other = self.trainer(checkpoint), self.trainer(checkpoint)
        if "divisible_step" not in one.capabilities:
            with pytest.raises(MilesError, match="divisible_step"):
                one.accumulate_gradients(batch)
            return
        before = copy_weights(one)
        one.accumulate_gradients(batch)
        one.drop_gradients()
        for part in ([0, 1, 2], [*range(3, len(batch))]):
            one.accumulate_gradients(batch.select(part))
            one.log_probs(batch, "old")  # other passes leave them
        assert all(torch.equal(before[n], t) for n, t in weights(one).items())
        assert one.apply_gradients(lr=1e-2)["train/lr"] == (1e-2, 1.0)
        other.step(batch, lr=1e-2)
        self.check_weights(weights(one), weights(other), self.atol)
        one.accumulate_gradients(batch)
        one.step(batch)  # drops what is held
        other.step(batch)
        self.check_weights(weights(one), weights(other), self.atol)

    def test_bad_held_gradients_are_dropped(self, checkpoint: Path, batch: Batch) -> None:
        trainer, other = self.trainer(checkpoint), self.trainer(checkpoint)
        if "divisible_step" not in trainer.capabilities:
            pytest.skip("the trainer computes a step as a whole")

        def not_finite(output: Output, micro: Batch, ctx: Context) -> Loss:
            assert output.log_probs is not None
            return Loss(output.log_probs.sum() * math.nan)

        trainer.accumulate_gradients(batch)
        trainer.accumulate_gradients(batch, not_finite)
        with pytest.raises(MilesError, match="gradient norm"):
            trainer.apply_gradients()
        trainer.accumulate_gradients(batch)
        trainer.apply_gradients()
        other.step(batch)
        assert all(torch.equal(t, weights(other)[n]) for n, t in weights(trainer).items())

    @pytest.mark.parametrize("cut", [{"micro_batch_size": 1}, {"micro_batch_size": None}, {"max_tokens": 24}])
    def test_the_result_does_not_depend_on_the_split(self, checkpoint: Path, batch: Batch, cut: dict[str, Any]) -> None:
        one, other = self.trainer(checkpoint), self.trainer(checkpoint, replace(Setup(), **cut))
        first, second = one.step(batch), other.step(batch)
        assert first.keys() == second.keys()
        for name in first:
            assert first[name] == pytest.approx(second[name], rel=1e-4, abs=1e-6), name
        self.check_weights(weights(one), weights(other), self.atol)

    def test_the_result_does_not_depend_on_the_order(self, checkpoint: Path, batch: Batch) -> None:
        one, other = self.trainer(checkpoint), self.trainer(checkpoint)
        one.step(batch)
        other.step(batch.select(list(reversed(range(len(batch))))))
        self.check_weights(weights(one), weights(other), self.atol)

    def test_a_given_loss_replaces_the_bound_one(self, checkpoint: Path, batch: Batch) -> None:
        trainer = self.trainer(checkpoint, replace(Setup(), weight_decay=0.0))
        before = copy_weights(trainer)

        def nothing(output: Output, micro: Batch, ctx: Context) -> Loss:
            assert output.log_probs is not None
            return Loss(output.log_probs.sum() * 0.0)

        metrics = trainer.step(batch, loss=nothing, lr=0.5)
        assert metrics["train/lr"][0] == 0.5 and "sum" not in metrics
        assert all(torch.equal(before[n], t) for n, t in weights(trainer).items())

    def test_every_chunk_is_called_once_a_micro_batch(self, checkpoint: Path, batch: Batch) -> None:
        trainer, calls = self.make_recording(checkpoint)
        trainer.step(batch)
        layers = [set(c.layers) for chunk in trainer.chunks for k, _, c in calls if k is chunk]
        assert len(trainer.chunks) == len({id(chunk) for chunk, _, _ in calls})
        assert set().union(*layers) == set(range(len(self.all_layers(trainer))))
        for chunk in trainer.chunks:
            seen = [int(i) for k, micro, _ in calls if k is chunk for i in micro.index]
            assert sorted(seen) == sorted(batch.index.tolist())

    def test_the_kind_of_pass_is_told(self, checkpoint: Path, batch: Batch) -> None:
        trainer, calls = self.make_recording(checkpoint, replace(Setup(), recompute=True))
        for kind in ("old", "ref", "verify"):
            trainer.log_probs(batch, kind)
            assert {(c.kind, c.recompute) for _, _, c in calls} == {(kind, False)}
            calls.clear()
        trainer.step(batch)
        assert {(c.kind, c.recompute) for _, _, c in calls} == {("train", True)}

    def test_rows_say_which_token_each_row_is(self, checkpoint: Path, batch: Batch) -> None:
        trainer, calls = self.make_recording(checkpoint)
        trainer.log_probs(batch, "old")
        for _, micro, ctx in calls:
            inputs = find_needed(micro)
            known = {(int(micro.tokens[r]), position(micro, r)) for r in ctx.rows.tolist() if r >= 0}
            assert {(int(micro.tokens[r]), position(micro, r)) for r in inputs} <= known

    def test_tokens_with_different_inputs_are_computed_apart(self, checkpoint: Path) -> None:
        batch = make_batch(tagged=True)
        trainer, calls = self.make_recording(checkpoint)
        trainer.log_probs(batch, "old")
        for _, micro, ctx in calls:
            assert find_needed(micro) <= set(ctx.rows.tolist())

    def test_a_micro_batch_that_trains_nothing_adds_nothing(self, checkpoint: Path, batch: Batch) -> None:
        idle = replace(batch, columns=batch.columns | {"loss_mask": torch.zeros_like(batch.mask)})
        trainer = self.trainer(checkpoint, replace(Setup(), weight_decay=0.0))
        before = copy_weights(trainer)
        assert trainer.log_probs(idle, "old")["log_probs"].abs().max() == 0
        assert trainer.step(idle)["train/grad_norm"][0] == 0
        assert all(torch.equal(before[n], t) for n, t in weights(trainer).items())

    def test_the_reference_stays(self, checkpoint: Path, batch: Batch) -> None:
        trainer = self.trainer(checkpoint)
        before = trainer.log_probs(batch, "old")["log_probs"]
        trainer.step(batch)
        torch.testing.assert_close(trainer.log_probs(batch, "ref")["log_probs"], before)
        assert not torch.allclose(trainer.log_probs(batch, "old")["log_probs"], before)

    def test_recomputation_changes_nothing(self, checkpoint: Path, batch: Batch) -> None:
        plain, saving = self.trainer(checkpoint), self.trainer(checkpoint, replace(Setup(), recompute=True))
        plain.step(batch)
        saving.step(batch)
        self.check_weights(weights(plain), weights(saving), self.atol)

    def test_recomputation_sees_the_state_of_its_own_call(self, checkpoint: Path, batch: Batch) -> None:
        active = self.active_context()
        if active is None:
            pytest.skip("this trainer's layers have no access to their context")
        trainer, calls = self.make_recording(checkpoint, replace(Setup(), recompute=True))
        inner, seen = trainer.callbacks.forward, []

        def marked(chunk: nn.Module, micro_batch: Batch, ctx: Context) -> Output:
            ctx.attached["mark"] = object()
            return inner(chunk, micro_batch, ctx)

        def note(module: nn.Module, args: Any, output: Any) -> None:
            ctx = active()
            assert ctx is not None
            seen.append(ctx.attached["mark"])

        trainer.callbacks.forward = marked
        for chunk in trainer.chunks:
            for name, module in chunk.named_modules():
                if name.endswith("o_proj"):
                    module.register_forward_hook(note)
        trainer.step(batch)
        marks = [ctx.attached["mark"] for _, _, ctx in calls for _ in ctx.layers]
        # Each layer runs twice per micro-batch, in forward and recomputation, both with the mark of that micro-batch.
        assert sorted(map(id, seen)) == sorted(map(id, marks * 2))

    def test_a_bad_gradient_stops_before_anything_changes(self, checkpoint: Path, batch: Batch) -> None:
        trainer = self.trainer(checkpoint, loss=lambda output, micro, ctx: Loss(output.log_probs.sum() * math.nan))
        before = copy_weights(trainer)
        with pytest.raises(MilesError, match="gradient norm"):
            trainer.step(batch)
        assert all(torch.equal(before[n], t) for n, t in weights(trainer).items())
        trainer.step(batch, loss=weighted)  # the failed step must not affect the next one

    def test_metrics_of_wrappers_are_added(self, checkpoint: Path, batch: Batch) -> None:
        trainer = self.trainer(checkpoint)
        inner = trainer.callbacks.forward

        def counting(chunk: nn.Module, micro_batch: Batch, ctx: Context) -> Output:
            ctx.metrics["samples"] = (torch.tensor(float(len(micro_batch))), torch.ones(()))
            return inner(chunk, micro_batch, ctx)

        trainer.callbacks.forward = counting
        assert trainer.step(batch)["samples"][0] == len(batch) * len(trainer.chunks)

    def test_resuming_continues_bit_for_bit(self, checkpoint: Path, batch: Batch, tmp_path: Path) -> None:
        one = self.trainer(checkpoint)
        one.step(batch)
        one.save(tmp_path / "saved")
        one.step(batch)
        other = self.trainer(checkpoint)
        other.load(tmp_path / "saved")
        other.step(batch)
        assert all(torch.equal(t, weights(other)[n]) for n, t in weights(one).items())
        other.step(batch)
        moved = {n: t for n, t in weights(one).items() if t.dim() > 1 and not (self.frozen and self.frozen in n)}
        assert not any(torch.equal(t, weights(other)[n]) for n, t in moved.items())

    def test_sleep_and_wake_change_nothing(self, checkpoint: Path, batch: Batch) -> None:
        one, other = self.trainer(checkpoint), self.trainer(checkpoint)
        if "sleep" not in one.capabilities:
            pytest.skip("the trainer cannot sleep")
        for trainer in (one, other):
            trainer.step(batch)
        one.sleep(["optimizer"])
        one.sleep()
        one.wake(["weights"])
        assert torch.equal(one.log_probs(batch, "old")["log_probs"], other.log_probs(batch, "old")["log_probs"])
        one.sleep(["weights"])
        one.wake()
        one.wake()
        for trainer in (one, other):
            trainer.step(batch)
        assert all(torch.equal(t, weights(other)[n]) for n, t in weights(one).items())

    def test_other_settings_apply_from_the_next_step(self, checkpoint: Path, batch: Batch) -> None:
        trainer = self.trainer(checkpoint)
        trainer.step(batch)
        trainer.configure({"lr": 0.0, "weight_decay": 0.5, "clip_grad": 0.0})
        before = {name: tensor.clone() for unit in trainer.units() for name, tensor in unit.tensors.items()}
        assert trainer.step(batch)["train/lr"] == (0.0, 1.0)
        after = {name: tensor for unit in trainer.units() for name, tensor in unit.tensors.items()}
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        trainer.configure({"lr": 1e-2})
        trainer.step(batch)
        after = {name: tensor for unit in trainer.units() for name, tensor in unit.tensors.items()}
        assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())

    def test_reset_forgets_the_moments_alone(self, checkpoint: Path, batch: Batch, tmp_path: Path) -> None:
        one = self.trainer(checkpoint)
        one.step(batch)
        one.export(tmp_path / "export", None)
        one.reset_optimizer()
        fresh = self.trainer(tmp_path / "export")
        one.step(batch)
        fresh.step(batch)
        self.check_weights(weights(one), weights(fresh), 1e-6)

    def test_units_are_the_checkpoint(self, checkpoint: Path) -> None:
        from safetensors.torch import load_file

        trainer, stored = self.trainer(checkpoint), load_file(checkpoint / "model.safetensors")
        units = [list(u.tensors) for u in trainer.units()]
        assert sorted(n for names in units for n in names) == sorted(stored)
        assert units == [list(u.tensors) for u in trainer.units()]
        for unit in trainer.units():
            for name, tensor in unit.tensors.items():
                torch.testing.assert_close(tensor.to(stored[name].dtype), stored[name], rtol=0, atol=0)
        for names in units:
            assert all((n.replace("gate_proj", "up_proj") in names) for n in names if "gate_proj" in n)
            assert len(names) == 1 or any("gate_proj" in n for n in names)

    def test_an_export_is_a_checkpoint(self, checkpoint: Path, batch: Batch, tmp_path: Path) -> None:
        trainer = self.trainer(checkpoint)
        trainer.step(batch)
        trainer.export(tmp_path / "export", None)
        expected, _ = yardstick(yardstick_model(tmp_path / "export"), batch, Setup().temperature)
        found = trainer.log_probs(batch, "old")["log_probs"].double()
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=self.atol)

    def make_recording(
        self, checkpoint: Path, setup: Setup | None = None
    ) -> tuple[Trainer, list[tuple[Any, Batch, Context]]]:
        """Make a trainer that records its forward calls."""
        trainer = self.trainer(checkpoint, setup)
        inner = trainer.callbacks.forward
        calls: list[tuple[Any, Batch, Context]] = []

        def noting(chunk: nn.Module, micro_batch: Batch, ctx: Context) -> Output:
            calls.append((chunk, micro_batch, ctx))
            return inner(chunk, micro_batch, ctx)

        trainer.callbacks.forward = noting
        return trainer, calls

    def all_layers(self, trainer: Trainer) -> list[nn.Module]:
        """Return the decoder layers of all chunks."""
        return [m for chunk in trainer.chunks for m in chunk.modules() if type(m).__name__.endswith("DecoderLayer")]

    def check_weights(self, one: dict[str, Tensor], other: dict[str, Tensor], atol: float) -> None:
        """Check that names are equal, and values equal within ``atol`` (weights change by about 1e-2 per step)."""
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            close = torch.allclose(tensor.double(), other[name].double(), rtol=0, atol=atol)
            assert close, f"{name} differs by up to {(tensor.double() - other[name].double()).abs().max():.3g}"
