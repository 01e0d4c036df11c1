"""Which critic belongs to which policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles_core.plugin import ConfigError

if TYPE_CHECKING:
    from miles_core.plugin import Policy, Run

CRITIC = "critic"


def critic_name(policy: str, alone: bool) -> str:
    """Return the name of the critic of a policy: ``critic``, or ``critic_NAME`` if several policies train."""
    return CRITIC if alone else f"{CRITIC}_{policy}"


def critic_of(policy: Policy, policies: Sequence[Policy]) -> Policy | None:
    """Return the critic of a policy that trains: the only critic if no other policy trains, else the one of its name."""
    alone = sum(p.role == "train" for p in policies) == 1
    critics = [p for p in policies if p.role == "critic"]
    if alone and len(critics) == 1:
        return critics[0]
    return next((p for p in critics if p.name == critic_name(policy.name, alone)), None)


def add_critics(run: Run) -> None:
    """Add a critic to each policy that trains and has none, with the policy's options and those of ``--critic-*``."""
    from miles_core.plugin import Policy  # a plan imports this module for its names, and needs no run

    trained = [p for p in run.policies if p.role == "train"]
    for policy in trained:
        config = run.config_of(policy)
        options = config.plugin("ppo")
        if options.trunk != "own" or critic_of(policy, run.policies) is not None:
            continue
        inherited = {path: item for path, item in run.config.policies.get(policy.name, {}).items() if "." in path}
        several = config.train.global_batch_size is not None or (config.train.num_steps_per_rollout or 1) > 1
        given = {**inherited, **policy.options, **options.overrides(several)}
        start = given.pop("model.hf_checkpoint", policy.hf_checkpoint)
        name = critic_name(policy.name, alone=len(trained) == 1)
        run.policies.append(Policy(options.checkpoint or start, name, "critic", options=given))


def check_estimators(run: Run) -> None:
    """Check that the advantage estimator of each policy that trains reads the critic's values.

    Raises:
        ConfigError: an estimator does not declare the column ``values``.
    """
    from miles_ppo.ppo import VALUES  # imports torch, which a plan does not need

    for policy in (p for p in run.policies if p.role == "train"):
        name = run.config_of(policy).algorithm.advantage_estimator
        estimator = run.hooks.make("advantage", name, run=run, policy=policy)
        needs = getattr(estimator, "needs", None)
        if needs is None or VALUES not in needs.columns:
            raise ConfigError(
                f"--advantage-estimator {name}: it does not declare the column {VALUES!r} (Needs(columns=({VALUES!r},))), so it does not read "
                "the values of the critic that ppo adds; leave ppo out of --plugins, or give --advantage-estimator ppo"
            )
