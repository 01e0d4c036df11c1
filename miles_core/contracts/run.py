"""The run object passed to plugins (configuration, resolved plan, progress), its policies, and the values that plugins attach to it.

A ``Run`` is complete when it is constructed. It gives no access to the parts built from it (engines and learners, see
``PolicyParts``) or to the driver's log (metrics, progress, examples), because workers in other processes have a ``Run`` too.

A policy is one model of a run. A run has one policy by default; self-play, critics and teachers use several. ``Policy`` holds the data
that every process needs (checkpoint, role, version served by the engine); ``PolicyParts`` holds the engine and the learner.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, get_args

from miles_core.config.config import Config
from miles_core.data.field import Field
from miles_core.data.prompts import PromptTemplate
from miles_core.data.sample import Sample
from miles_core.errors import DataError, PluginError
from miles_core.observe.timer import Clock
from miles_core.plugin.load import Hooks
from miles_core.plugin.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")


class StateKey(Generic[T]):
    """A key private to the module that creates it, at module level: ``ROUTES = StateKey[dict[int, Tensor]]()``.

    Attributes:
        module: the module that created it.
    """

    def __init__(self) -> None:
        frame = sys._getframe(1)
        while (
            frame.f_globals.get("__name__") == "typing" and frame.f_back is not None
        ):  # StateKey[T]() calls it from there
            frame = frame.f_back
        self.module = str(frame.f_globals.get("__name__"))


class RunState:
    """A mapping from ``StateKey[T]`` to ``T``."""

    def __init__(self) -> None:
        self._values: dict[StateKey[Any], Any] = {}

    def __setitem__(self, key: StateKey[T], value: T) -> None:
        self._values[key] = value

    def __getitem__(self, key: StateKey[T]) -> T:
        if key not in self._values:
            made = f"the StateKey of {key.module}" if isinstance(key, StateKey) else f"the key {key!r}"
            raise PluginError(
                f"nothing is stored under {made}; store a value first, or read it with run.state.get(key, default) or setdefault"
            )
        return cast(T, self._values[key])

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: StateKey[T], default: T) -> T:
        """Return the stored value, or ``default`` if there is none."""
        return cast(T, self._values.get(key, default))

    def setdefault(self, key: StateKey[T], default: T) -> T:
        """Return the stored value; store ``default`` first if there is none."""
        return cast(T, self._values.setdefault(key, default))


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

#: ``train``: generates samples and learns from them. ``critic``: has a value head instead of an output layer, and learns when a
#: ``wrap_learn`` hook calls its learner. ``frozen``: never learns; scores samples (teacher, reference) and may generate (opponent).
Role = Literal["train", "critic", "frozen"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(eq=False)
class Policy:
    """One model of a run.

    Attributes:
        hf_checkpoint: directory of the initial checkpoint; "" is the run's ``--hf-checkpoint``.
        name: name of the policy's checkpoint folder, and the prefix of its metrics if several policies train.
        role: see ``Role``.
        generates: whether the policy has an engine; by default policies of the role ``train`` do.
        follows: name of the policy whose states a frozen policy loads, as a past version or a refreshed teacher does; its model then has
            the same parts, such as adapters.
        options: option -> value, for options that differ from the run's; keys as in a configuration file (``lr`` or
            ``train.lr``). ``Run.config_of`` applies them.
        version: the last weight version that the policy's engine received; -1 before the first.
        trained: number of optimiser steps, without those of a warm start.
    """

    hf_checkpoint: str = ""
    name: str = "policy"
    role: Role = "train"
    generates: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    version: int = -1
    trained: int = 0
    follows: str = ""

    def __post_init__(self) -> None:
        if self.generates is None:
            self.generates = self.role == "train"

    @property
    def learns(self) -> bool:
        """Whether the policy has an optimiser."""
        return self.role != "frozen"


def check_policies(policies: Sequence[object], generates: bool = True) -> None:
    """Check ``run.policies`` after ``on_start``: at least one policy trains, and the names are unique and valid folder names.

    Args:
        policies: the policies.
        generates: whether the schedule generates samples, so that policies that train need engines (``Run.generates``).

    Raises:
        PluginError: a policy is invalid, or no policy trains.
    """
    known: dict[str, Policy] = {}
    for policy in policies:
        if not isinstance(policy, Policy):
            raise PluginError(
                f"run.policies holds {policy!r:.80} after on_start; it is a list of miles_core.plugin.Policy"
            )
        name: object = policy.name
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "state":
            raise PluginError(
                f"a policy has the name {name!r:.80}: it names a folder of every checkpoint, next to 'state'; use letters, digits, _ and -"
            )
        if name in known:
            raise PluginError(f"two policies have the name {name!r}; give Policy(name=...) another")
        if policy.role not in ROLES:
            raise PluginError(
                f"the policy {name} has the role {policy.role!r:.80}; a role is one of {', '.join(ROLES)}"
            )
        if policy.role == "critic" and policy.generates:
            raise PluginError(
                f"the policy {name} is a critic, whose model predicts values and no tokens; leave generates=True out"
            )
        known[name] = policy
    if not known:
        raise PluginError("run.policies is empty after on_start; a run trains at least one policy")
    if not any(policy.role == "train" for policy in known.values()):
        raise PluginError(
            f"no policy has the role train ({', '.join(known)}); a run trains at least one policy that generates"
        )
    for policy in known.values():
        if policy.role == "train" and generates and not policy.generates:
            raise PluginError(
                f"the policy {policy.name} has the role train and generates=False; it learns from samples of its own, so give it "
                "an engine, or the role critic or frozen"
            )


@dataclass(kw_only=True, eq=False)
class Run:
    """State shared by core and plugins; plugins store their own state in ``state``.

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
        started: whether the checkpoint was loaded, or there is none to load.
        stop_requested: whether the user requested a stop; takes effect immediately during a rollout, else after the step.
        clock: measures the time of each phase, in seconds.
        state: typed plugin state.
        at_end: functions that receive the number of completed steps and the reason when the run ends, in the driver: ``finished``, ``stopped by
            SIGTERM`` or the error in one line. An error that one raises is logged.
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
    started: bool = False
    stop_requested: bool = False
    clock: Clock = field(default_factory=Clock)
    state: RunState = field(default_factory=RunState)
    at_end: list[Callable[[int, str], None]] = field(default_factory=list)
    _configs: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @property
    def policy(self) -> Policy:
        """The first policy that trains."""
        return next((p for p in self.policies if p.role == "train"), self.policies[0])

    @property
    def generates(self) -> bool:
        """Whether the schedule generates samples (``Schedule.generates``)."""
        return bool(getattr(self.hooks.builder("schedule", self.config.run.schedule)[1], "generates", True))

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
        if {s.policy for s in samples} == {policy.name} and names.get(policy.name) == "train":
            return samples
        for sample in samples:
            if sample.policy and names.get(sample.policy) != "train":
                known = ", ".join(name for name, role in names.items() if role == "train")
                raise DataError(
                    f"sample {sample.index} names the policy {sample.policy!r}, and the policies of this run that learn from samples "
                    f"are: {known}"
                )
        return [s for s in samples if (s.policy or self.policy.name) == policy.name]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode token ids to text, including special tokens."""
        return str(self.tokenizer.decode(list(tokens)))

    def prefix_metrics(self, policy: Policy, metrics: dict[str, float]) -> dict[str, float]:
        """Prefix the metric names of a policy with its name, unless it is the only policy that trains."""
        if self.is_only_trained(policy):
            return metrics
        return {f"{policy.name}/{name}": value for name, value in metrics.items()}

    def is_only_trained(self, policy: Policy) -> bool:
        """Whether ``policy`` is the only policy with the role ``train``; other policies only score samples or are critics."""
        return [p for p in self.policies if p.role == "train"] == [policy]
