"""The run object passed to plugins: configuration, resolved plan and progress.

A ``Run`` is complete when it is constructed. It gives no access to the parts built from it (engines and learners, see
``PolicyParts``) or to the driver's log (metrics, progress, examples), because workers in other processes have a ``Run`` too.
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
    """State shared by core and plugins; plugins store their own state in ``stash``.

    Attributes:
        config: the effective configuration.
        plan: the accepted plan.
        hooks: the registered hooks.
        fields: declared columns of core and the active plugins.
        directory: the run directory, where all files of the run are written.
        tokenizer: the checkpoint's tokenizer.
        render: the template that converts a prompt to token ids with ``tokenizer``.
        policies: one policy by default, or those of the table ``policies`` of a configuration file; ``on_start`` may add more.
        step: number of completed steps, which is also the index of the current step.
        stop_requested: whether the user requested a stop; takes effect immediately during a rollout, else after the step.
        clock: measures the time of each phase, in seconds.
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
        """The first policy that trains."""
        return next((p for p in self.policies if p.role == "train"), self.policies[0])

    def config_of(self, policy: Policy) -> Config:
        """Return the configuration of one policy: the run's configuration with the policy's checkpoint and options applied.

        Raises:
            ConfigError: ``Policy.options`` has an unknown key or an invalid value.
        """
        if not policy.options and policy.hf_checkpoint in ("", self.config.model.hf_checkpoint):
            return self.config
        key = (policy.name, policy.hf_checkpoint, tuple(policy.options.items()))
        if self._configs.get(policy.name, (None,))[0] != key:
            self._configs[policy.name] = (
                key,
                self.config.for_policy(policy.name, policy.options, policy.hf_checkpoint),
            )
        config: Config = self._configs[policy.name][1]
        return config

    def select_policy(self, policy: Policy, groups: list[list[Sample]]) -> list[Sample]:
        """Return the samples of a policy (``Sample.policy``). Samples without a policy name belong to the first policy that trains.

        Raises:
            DataError: a sample names a policy that does not exist or does not train on samples.
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

    def decode(self, tokens: list[int]) -> str:
        """Decode token ids to text, including special tokens."""
        return str(self.tokenizer.decode(tokens))

    def prefix_metrics(self, policy: Policy, metrics: dict[str, float]) -> dict[str, float]:
        """Prefix the metric names of a policy with its name, unless it is the only policy that trains."""
        if self.is_only_trained(policy):
            return metrics
        return {f"{policy.name}/{name}": value for name, value in metrics.items()}

    def is_only_trained(self, policy: Policy) -> bool:
        """Whether ``policy`` is the only policy with the role ``train``; other policies only score samples or are critics."""
        return [p for p in self.policies if p.role == "train"] == [policy]
