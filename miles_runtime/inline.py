"""The runtime that runs trainer, engine and driver in one process; with ``--rollout-workers``, rollouts run in others.

It has the same interface as other runtimes: the learner consists of one worker, whose methods are called directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Policy, Run
from miles_core.contracts.runtime import PolicyParts, Producer, Runtime
from miles_core.contracts.trainer import ALL_PARTS
from miles_core.plugin.detect import gpu_facts, model_facts
from miles_mismatch.parity import check_sides
from miles_mismatch.same_model import check_same_model
from miles_runtime.busy import Busy
from miles_runtime.learner_front import LearnerFront
from miles_runtime.local_workers import rollout_processes
from miles_runtime.output import Output
from miles_runtime.patience import Patience
from miles_runtime.rank import Rank, RankHere
from miles_runtime.restarts import Restarts
from miles_runtime.rollout_front import RolloutFront
from miles_runtime.workers import Workers


class InlineRuntime(Runtime):
    """Trainer, engine and driver in one process."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.engines: list[Engine] = []
        self.ranks: list[Rank] = []
        self.busy = Busy()
        self.rollouts: Workers | None = None
        self.output = Output(run.directory)

    async def build(self, policy: Policy) -> PolicyParts:
        run, colocate = self.run, self.run.config.run.colocate and policy.generates
        # The driver is the only worker: check the rules that could not be checked during planning.
        run.plan.check_deferred([*gpu_facts(), *model_facts(policy.hf_checkpoint)])
        with run.clock.phase("start_trainer"):
            trainer = run.hooks.make("trainer", run.config.run.trainer, run=run, policy=policy)
            rank = Rank(run, policy, trainer)
        self.ranks.append(rank)
        if not policy.generates:
            return PolicyParts(policy, LearnerFront(run, policy, RankHere(rank), [rank.world]), None, rank.precisions)
        if colocate:  # an engine may allocate all memory that is free when it starts
            rank.hold(())
        with run.clock.phase("start_engine"):
            engine: Engine = run.hooks.make("engine", run.config.run.engine, run=run, policy=policy)
            self.engines.append(engine)
            await engine.start()
        if colocate:
            await engine.sleep(["cache"])
            rank.hold(ALL_PARTS)
        check_same_model(run, policy, trainer, engine)
        parity = check_sides(run, policy, trainer, engine)
        rank.connect(engine)
        learner = LearnerFront(run, policy, RankHere(rank), [rank.world], engine)
        engine.resend = learner.resend
        return PolicyParts(policy, learner, engine, rank.precisions, parity)

    def producer(self, local: Producer, parts: Sequence[PolicyParts]) -> Producer:
        options = self.run.config.run
        if (count := self.run.config.rollout.workers) is None:
            return local
        if self.rollouts is None:
            self.output.follow()
            patience = Patience(options.worker_timeout, options.worker_build_timeout, options.worker_heartbeat)
            names = [f"rollout-{number}" for number in range(count)]
            self.rollouts = rollout_processes(self.run, names, patience, self.busy)
        return RolloutFront(self.run, self.rollouts, parts, Restarts(options.max_restarts))

    def metrics(self) -> dict[str, float]:
        return {} if self.rollouts is None else self.busy.metrics()

    def activity(self) -> Mapping[str, int]:
        return {} if self.rollouts is None else {name: self.busy.open(name) for name in self.rollouts.names}

    async def close(self) -> None:
        if self.rollouts is not None:
            await self.output.close()
        for engine in self.engines:
            await engine.stop()
        for rank in self.ranks:
            rank.close()


def make_runtime(run: Run) -> InlineRuntime:
    """The runtime named ``inline``."""
    return InlineRuntime(run)
