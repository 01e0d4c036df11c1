"""Contract tests for value heads (``make_head``).

Subclass the contract and name the plugins and options of a toy run whose critic has the head::

    class TestMyHead(HeadContract):
        plugins = ("ppo", "mine")
        options = {"advantage_estimator": "ppo"}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_testing.run_contract import RunContract
from miles_testing.toy import ToyRun


class HeadContract(RunContract):
    """Contract tests for a value head.

    Attributes:
        module: name of the head in the model that is trained.
    """

    module = "miles_value_head"

    def head(self, done: ToyRun) -> tuple[nn.Module, int]:
        """Return the trained head of a run's first policy that has one, and the model's hidden size."""
        for parts in done.parts:
            learner: Any = parts.learner
            model = learner.rank.trainer.model
            if hasattr(model, self.module):
                return model.get_submodule(self.module), model.get_input_embeddings().weight.shape[1]
        raise AssertionError(f"no policy of the run has a model with a module {self.module}")

    def test_one_value_per_row(self) -> None:
        head, hidden = self.head(self.whole_run())
        states = _states(7, hidden, head)
        values = head(states)
        assert values.shape in ((7,), (7, 1)), f"values have the shape {list(values.shape)}; expected [7] or [7, 1]"
        assert bool(torch.isfinite(values).all())

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """Values must not depend on how a batch was packed."""
        head, hidden = self.head(self.whole_run())
        states = _states(7, hidden, head)
        with torch.no_grad():
            together = head(states).reshape(-1)
            alone = torch.cat([head(states[i : i + 1]).reshape(-1) for i in range(7)])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)

    def test_every_parameter_has_a_gradient(self) -> None:
        head, hidden = self.head(self.whole_run())
        states = _states(7, hidden, head)
        named = {name: p for name, p in head.named_parameters() if p.requires_grad}
        assert named, "the head has no parameter to train"
        found = torch.autograd.grad(head(states).float().square().sum(), list(named.values()), allow_unused=True)
        dead = [n for n, g in zip(named, found, strict=True) if g is None or not bool(g.abs().max() > 0)]
        assert not dead, f"no gradient reaches {', '.join(dead)}"

    def test_training_changes_it(self) -> None:
        first, second = (_weights(self.head(done)[0]) for done in (self.run(steps=1), self.whole_run()))
        assert any(not torch.equal(first[name], second[name]) for name in first)

    def test_its_weights_are_in_the_checkpoint(self, tmp_path: Path) -> None:
        whole = _weights(self.head(self.whole_run())[0])
        self.run(directory=tmp_path / "run", steps=1)
        resumed = _weights(self.head(self.run(directory=None, save=None, load=tmp_path / "run"))[0])
        assert whole.keys() == resumed.keys()
        assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def _states(rows: int, hidden: int, head: nn.Module) -> Tensor:
    """Random hidden states, [rows, hidden], in the dtype of the head."""
    generator = torch.Generator().manual_seed(0)
    like = next(head.parameters())
    return torch.randn(rows, hidden, generator=generator).to(like)


def _weights(head: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
