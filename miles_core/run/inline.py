"""The runtime that runs trainer, engine and driver in one process."""

from __future__ import annotations

from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Policy, Run
from miles_core.contracts.runtime import PolicyParts, Runtime
from miles_core.contracts.trainer import ALL_PARTS
from miles_core.mismatch.first_steps import make_check
from miles_core.mismatch.parity import check_sides
from miles_core.mismatch.same_model import compare_models
from miles_core.plugin.detect import gpu_facts, model_facts
from miles_core.train.local_learner import LocalLearner
from miles_core.train.rank import Rank


class InlineRuntime(Runtime):
    """Trainer, engine and driver in one process."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.engines: list[Engine] = []
        self.ranks: list[Rank] = []

    async def build(self, policy: Policy) -> PolicyParts:
        run, colocate = self.run, self.run.config.run.colocate and policy.generates
        # The driver is the only worker: check the rules that could not be checked during planning.
        run.plan.check_deferred([*gpu_facts(), *model_facts(policy.hf_checkpoint)])
        with run.clock.phase("start_trainer"):
            trainer = run.hooks.make("trainer", run.config.run.trainer, run=run, policy=policy)
            rank = Rank(run, policy, trainer)
        self.ranks.append(rank)
        if not policy.generates:
            return PolicyParts(policy, LocalLearner(rank), None, rank.precisions)
        if colocate:  # an engine may allocate all memory that is free when it starts
            rank.hold(())
        with run.clock.phase("start_engine"):
            engine: Engine = run.hooks.make("engine", run.config.run.engine, run=run, policy=policy)
            self.engines.append(engine)
            await engine.start()
        if colocate:
            await engine.sleep(["cache"])
            rank.hold(ALL_PARTS)
        compare_models(run, policy, trainer.model_facts(), engine.model_facts())
        parity = check_sides(run, policy, trainer, engine)
        rank.connect(engine)
        learner = LocalLearner(rank, engine)
        engine.resend = learner.resend
        parts = PolicyParts(policy, learner, engine, rank.precisions, parity)
        learner.check = make_check(run, parts)
        return parts

    async def discard(self, parts: PolicyParts) -> None:
        assert isinstance(parts.learner, LocalLearner)
        if parts.engine is not None:
            self.engines.remove(parts.engine)
            await parts.engine.stop()
        self.ranks.remove(parts.learner.rank)
        parts.learner.rank.close()

    async def close(self) -> None:
        for engine in self.engines:
            await engine.stop()
        for rank in self.ranks:
            rank.close()


def make_runtime(run: Run) -> Runtime:
    """Create the runtime named ``inline``; with ``--rollout-workers``, the part that has rollouts in other processes."""
    if run.config.rollout.workers is None:
        return InlineRuntime(run)
    made: Runtime = run.hooks.make("inline_rollouts", "processes", run=run)
    return made
