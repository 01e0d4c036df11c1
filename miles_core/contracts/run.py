"""A run as plugins see it: what was asked for, what was resolved, and where the run stands.

Complete when it exists. The parts that are built from it (engines, learners) are in ``PolicyParts``, what it tells (metrics,
progress, examples) goes through the driver's log; neither is reached from here, because a worker of another process has a
``Run`` too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        policies: one by default, or those of the table ``policies`` of a configuration file; ``on_start`` may add more.
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
    _configs: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @property
    def policy(self) -> Policy:
        """The first policy that trains: the one of a run that has one."""
        return next((p for p in self.policies if p.role == "train"), self.policies[0])

    def config_of(self, policy: Policy) -> Config:
        """The configuration of one policy: the run's, with the policy's own checkpoint and options in force.

        Raises:
            ConfigError: ``Policy.options`` has a key that is no option of a policy, or a value that it cannot take.
        """
        if not policy.options and policy.hf_checkpoint in ("", self.config.model.hf_checkpoint):
            return self.config
        key = (policy.name, policy.hf_checkpoint, tuple(policy.options.items()))
        if self._configs.get(policy.name, (None,))[0] != key:
            self._configs[policy.name] = (
                key,
                self.config.for_policy(policy.name, policy.options, policy.hf_checkpoint),
            )
        found: Config = self._configs[policy.name][1]
        return found

    def own(self, policy: Policy, groups: list[list[Sample]]) -> list[Sample]:
        """The samples that name a policy (``Sample.policy``); those that name none belong to the first one that trains.

        Raises:
            DataError: a sample names a policy that does not exist or does not learn from samples, so nothing would learn from it.
        """
        names = {p.name: p.role for p in self.policies}
        samples = [s for group in groups for s in group]
        for sample in samples:
            if sample.policy and names.get(sample.policy) != "train":
                known = ", ".join(name for name, role in names.items() if role == "train")
                raise DataError(
                    f"sample {sample.index} names the policy {sample.policy!r}, and the policies of this run that learn from samples "
                    f"are: {known}"
                )
        return [s for s in samples if (s.policy or self.policy.name) == policy.name]

    def text(self, tokens: list[int]) -> str:
        """Decoded token ids, special tokens included."""
        return str(self.tokenizer.decode(tokens))

    def named(self, policy: Policy, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of one policy, with its name in front unless it is the only one that trains."""
        if self.alone(policy):
            return metrics
        return {f"{policy.name}/{name}": value for name, value in metrics.items()}

    def alone(self, policy: Policy) -> bool:
        """Whether a policy is the only one of the run that trains on samples of its own (others score, or are its critics)."""
        return [p for p in self.policies if p.role == "train"] == [policy]
