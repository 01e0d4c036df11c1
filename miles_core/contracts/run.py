"""A run as plugins see it: what was asked for, what was resolved, and where the run stands.

Complete when it exists. The parts that are built from it (engines, learners) are in ``PolicyParts``, what it tells (metrics,
progress, examples) goes through the driver's log; neither is reached from here, because a worker of another process has a
``Run`` too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.config.config import Config
from miles_core.contracts.policy import Policy
from miles_core.data.field import Field
from miles_core.data.sample import Sample
from miles_core.data.template import PromptTemplate
from miles_core.errors import DataError
from miles_core.observe.timer import Clock
from miles_core.plugin.load import Hooks
from miles_core.plugin.plan import Plan
from miles_core.stash import Stash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True, eq=False)
class Run:
    """Shared by core and plugins; plugins hang their own state on ``stash``.

    Attributes:
        config, plan, hooks: what was asked for, what was resolved, who is told.
        fields: declared columns of core and the active plugins.
        directory: where everything of this run is written.
        tokenizer: the checkpoint's; ``render`` makes a prompt's token ids with it.
        policies: one by default; ``on_start`` may add more.
        step: completed steps; during a step, the number of the step under way.
        stop_requested: the user asked to stop; honoured at once during a rollout, else after the step.
        clock: seconds by phase.
        stash: typed plugin state.
    """

    config: Config
    plan: Plan
    hooks: Hooks
    fields: tuple[Field, ...]
    directory: Path
    tokenizer: PreTrainedTokenizerBase
    render: PromptTemplate
    policies: list[Policy]
    step: int = 0
    stop_requested: bool = False
    clock: Clock = field(default_factory=Clock)
    stash: Stash = field(default_factory=Stash)

    @property
    def policy(self) -> Policy:
        """The policy of a run that has one."""
        return self.policies[0]

    def own(self, policy: Policy, groups: list[list[Sample]]) -> list[Sample]:
        """The samples that a policy learns from: all where it is the only one, else those whose metadata names it (``policy``), or
        names nobody.

        Raises:
            DataError: a sample names a policy that the run does not have, so nobody would learn from it.
        """
        samples = [s for group in groups for s in group]
        if len(self.policies) == 1:
            return samples
        names = [p.name for p in self.policies]
        for sample in samples:
            if (named := sample.metadata.get("policy", policy.name)) not in names:
                raise DataError(
                    f"sample {sample.index} names the policy {named!r} in its metadata, and the run has {', '.join(names)}"
                )
        return [s for s in samples if s.metadata.get("policy", policy.name) == policy.name]

    def text(self, tokens: list[int]) -> str:
        """Decoded token ids, special tokens included."""
        return str(self.tokenizer.decode(tokens))

    def named(self, policy: Policy, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of one policy, prefixed when there are several."""
        return metrics if len(self.policies) == 1 else {f"{policy.name}/{k}": v for k, v in metrics.items()}
