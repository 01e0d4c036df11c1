"""The league: state of all sides during a run, and the end of steps and rounds.

Runs in the driver. ``state`` holds the data for a resumed run; past versions are in the pool.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from miles_coevolution.config import CoevolutionConfig
from miles_coevolution.pool import Pool
from miles_coevolution.population import FACTOR, FRACTION, Options, Side, select
from miles_coevolution.rounds import CYCLE, Tally, outcomes, seeded, swing
from miles_core.data import Sample
from miles_core.plugin import Run
from miles_core.trainer import LearnerHandle

log = logging.getLogger(__name__)


class League:
    """Members, their options and scores, and past versions.

    Args:
        run: the run.
        options: options of the plugin.
        sides: all sides.
        values: options of each member that vary.
        versions: past versions that are kept of each side.

    Attributes:
        handles: learners by policy; set when all policies are built.
    """

    def __init__(
        self,
        run: Run,
        options: CoevolutionConfig,
        sides: Sequence[Side],
        values: Mapping[str, Options],
        versions: int,
    ) -> None:
        self.run, self.options, self.sides = run, options, list(sides)
        self.handles: Mapping[str, LearnerHandle] = {}
        self.pool = Pool(run.directory, versions)
        self._initial = {name: dict(own) for name, own in values.items()}
        self._metrics: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        """Go back to the state before the first step; a run that loses a worker before its first checkpoint starts again."""
        self.values = {name: dict(own) for name, own in self._initial.items()}
        self.fitness, self.phase, self.step = Tally(), Tally(), Tally()
        self.history: dict[str, list[float]] = {}
        self.slots: dict[str, int] = {}
        self.pool.versions = {}
        self.replaced = 0
        self._applied = {name: dict(own) for name, own in self._initial.items()}

    async def before(self, member: str) -> None:
        """Give a member's trainer its options after a mutation or a resume, and keep the initial version of each side."""
        if self.values[member] and self._applied.get(member) != self.values[member]:
            await self.handles[member].configure(self.values[member])
            self._applied[member] = dict(self.values[member])
        for side in self.sides:
            if side.past and side.name not in self.pool.versions:
                await self._keep(side, side.name, 0)
                self.slots[side.name] = -1  # the checkpoint, which is not version 0 after a warm start

    def count(self, member: str, samples: Sequence[Sample]) -> None:
        """Count the games of a member in this step."""
        side = next(side.name for side in self.sides if member in side.members)
        self.fitness.add(member, outcomes(samples, "score"))
        self.phase.add(side, outcomes(samples, "win", past=False))
        for name, what, past in (("score", "score", None), ("win", "win", False), ("win_against_past", "win", True)):
            self.step.add(f"coevolution/{side}/{name}", outcomes(samples, what, past))
        if len(self.values) > len(self.sides):
            self.step.add(f"coevolution/{member}/member_score", outcomes(samples, "score"))

    async def end_step(self, done: int) -> None:
        """Finish step ``done`` (number of completed steps) after all policies have learned."""
        self._collect()
        alternating = self.options.strategy == "alternating"
        if done % self.options.interval == 0:
            self._end_phase()
        if done % (self.options.interval * (len(self.sides) if alternating else 1)) == 0:
            await self._end_round(done)
        for side in self.sides:
            if side.past:
                await self._seat(side, done)

    def _collect(self) -> None:
        """Make the metrics of a step from its games."""
        found = self.step.means()
        self._metrics |= found
        wins = [value for name, value in found.items() if name.endswith("/win")]
        members = [value for name, value in found.items() if name.endswith("/member_score")]
        contest = wins if len(wins) > 1 else members
        if len(contest) > 1:
            self._metrics["coevolution/dominance"] = max(contest)
        for member, own in self.values.items():
            self._metrics |= {f"coevolution/{member}/{path.partition('.')[2]}": value for path, value in own.items()}
        self.step = Tally()

    def _end_phase(self) -> None:
        for side, mean in self.phase.means().items():
            kept = self.history.setdefault(side, [])
            kept.append(mean)
            del kept[: -CYCLE - 1]
            if len(self.sides) > 1:
                self._metrics[f"coevolution/{side}/swing"] = swing(kept)
        self.phase = Tally()

    async def _end_round(self, done: int) -> None:
        """Selection in each population, then one more past version of each side."""
        means = self.fitness.means()
        for side in self.sides:
            own = {name: means[name] for name in side.members if name in means}
            if len(own) > 1:
                await self._evolve(side, own, done)
            if side.past:
                best = max(own, key=lambda name: own[name]) if own else side.name
                await self._keep(side, best, done)
        self.fitness = Tally()

    async def _evolve(self, side: Side, fitness: Mapping[str, float], done: int) -> None:
        """Replace the worst members of a side by mutated copies of the best."""
        draw = seeded(self.run.config.train.seed, "select", side.name, done)
        chosen = select(fitness, self.values, FRACTION, FACTOR, draw)
        copies = self.pool.directory / "copies"
        shutil.rmtree(copies, ignore_errors=True)  # of a run that ended abruptly
        for winner in sorted({each.winner for each in chosen}):
            await self.handles[winner].save(copies / winner)
        for each in chosen:
            await self.handles[each.loser].load(copies / each.winner)
            self.values[each.loser] = each.options
            self._applied.pop(each.loser, None)
            log.info(
                "step %d: %s (score %.3g) becomes a copy of %s (%.3g) with %s",
                done,
                each.loser,
                fitness[each.loser],
                each.winner,
                fitness[each.winner],
                ", ".join(f"{p.partition('.')[2]} {v:.3g}" for p, v in self.values[each.loser].items())
                or "its options",
            )
        shutil.rmtree(copies, ignore_errors=True)
        self.replaced += len(chosen)
        self._metrics["coevolution/replaced"] = float(self.replaced)
        self._metrics[f"coevolution/{side.name}/score_spread"] = max(fitness.values()) - min(fitness.values())

    async def _keep(self, side: Side, member: str, version: int) -> None:
        """Add the current weights of a member to the past versions of its side."""
        await self.handles[member].save(self.pool.make_room(side.name, version))
        self.pool.add(side.name, version)

    async def _seat(self, side: Side, done: int) -> None:
        """Load the past version that plays in the next step, drawn from the pool."""
        version = seeded(self.run.config.train.seed, "seat", side.name, done).choice(self.pool.versions[side.name])
        if version != self.slots[side.name]:
            await self.handles[side.past].load(self.pool.path(side.name, version))
            self.slots[side.name] = version
        self._metrics[f"coevolution/{side.name}/past_age"] = float(done - version)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        found, self._metrics = self._metrics, {}
        return found

    def state(self) -> dict[str, Any]:
        """JSON data for a checkpoint."""
        return {
            "values": self.values,
            "fitness": self.fitness.data,
            "phase": self.phase.data,
            "history": self.history,
            "slots": self.slots,
            "replaced": self.replaced,
            "pool": self.pool.versions,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; the pool is loaded separately."""
        self.values, self.history, self.slots = dict(state["values"]), dict(state["history"]), dict(state["slots"])
        self.fitness, self.phase = Tally(dict(state["fitness"])), Tally(dict(state["phase"]))
        self.replaced = int(state["replaced"])
        self.step, self._metrics, self._applied = Tally(), {}, {}
