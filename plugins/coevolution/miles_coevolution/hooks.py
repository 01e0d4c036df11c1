"""Hooks of co-evolution: adds policies, selects the sides that learn in a step, and ends rounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from miles_coevolution.config import MUTABLE, CoevolutionConfig, count_past_versions
from miles_coevolution.game import MATCHMAKER, group_attempts
from miles_coevolution.league import League
from miles_coevolution.matches import Matchmaker
from miles_coevolution.population import FACTOR, Side, active_sides, perturb
from miles_coevolution.rounds import seeded
from miles_core.data import Sample
from miles_core.plugin import ConfigError, Policy, Run, StateKey, Store, hookimpl
from miles_core.trainer import Learned, LearnerHandle

#: State of all sides, for other parts of a run.
LEAGUE = StateKey[League]()
Learn = Callable[[Sequence[Sample], int], Awaitable[Learned]]


class Coevolution:
    """Adds the members of populations and past opponents, and trains them in phases."""

    def __init__(self, options: CoevolutionConfig) -> None:
        self.options = options
        self.league: League

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Add policies: further members of each side, and one frozen policy for its past versions."""
        options = self.options
        paths = [MUTABLE[name] for name in options.mutate] if (options.population_size or 1) > 1 else []
        values: dict[str, dict[str, float]] = {}
        sides = []
        trained = [policy for policy in run.policies if policy.role == "train"]
        versions = count_past_versions(
            options.past_versions, len(trained), options.population_size, run.config.rollout.generate
        )
        for base in trained:
            config = run.config_of(base)
            values[base.name] = {path: float(config.get(path)) for path in paths}
            members = [base.name, *(f"{base.name}-{n}" for n in range(1, options.population_size or 1))]
            for name in members[1:]:
                draw = seeded(run.config.train.seed, "spread", name)
                values[name] = perturb(values[base.name], FACTOR, draw)
                own = {**base.options, **values[name]}
                run.policies.append(Policy(base.hf_checkpoint, name, "train", options=own))
            past = f"{base.name}-past" if versions else ""
            if past:
                run.policies.append(
                    Policy(base.hf_checkpoint, past, "frozen", True, dict(base.options), follows=base.name)
                )
            sides.append(Side(base.name, tuple(members), past))
        if len(sides) == 1 and len(sides[0].members) == 1 and not sides[0].past:
            raise ConfigError(
                f"coevolution: the policy {sides[0].name} plays with itself alone; add a policy to the table policies of the configuration "
                "file, give --co-evolution-population-size 2 or more, or --co-evolution-past-versions"
            )
        self.league = run.state[LEAGUE] = League(run, options, sides, values, versions)
        run.state[MATCHMAKER] = Matchmaker(sides, run.config.train.seed, self.active, options.past_probability)

    def active(self, step: int) -> tuple[Side, ...]:
        """The sides that learn in ``step``."""
        return active_sides(self.league.sides, step, self.options.interval, self.options.strategy == "alternating")

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Callable[[Learn], Learn]:
        league = self.league
        league.handles = handles
        first, *_, last = [league.sides[0].name, *(p.name for p in run.policies if p.role == "train")]

        def wrap(inner: Learn) -> Learn:
            async def learn(samples: Sequence[Sample], step: int) -> Learned:
                if step == 0 and policy.name == first:
                    league.restart()
                await league.before(policy.name)
                league.count(policy.name, samples)
                learns = any(policy.name in side.members for side in self.active(step)) and len(samples) > 0
                learned = await inner(group_attempts(samples), step) if learns else Learned({}, 0)
                if policy.name == last:
                    await league.end_step(step + 1)
                return learned

            return learn

        return wrap

    @hookimpl
    def on_step(self, run: Run, metrics: dict[str, float]) -> None:
        sides = self.active(run.step - 1)
        for number, side in enumerate(self.league.sides):
            if len(sides) == 1 and side is sides[0]:
                metrics["coevolution/phase"] = float(number)
        metrics |= self.league.take_metrics()

    @hookimpl
    def on_save(self, run: Run, policy: Policy | None, store: Store) -> None:
        if policy is None:
            store.put("coevolution", data=self.league.state())
            self.league.pool.save(store.directory)

    @hookimpl
    def on_load(self, run: Run, policy: Policy | None, store: Store) -> None:
        if policy is None:
            state = store.get("coevolution")[1]
            self.league.load_state(state)
            self.league.pool.load(store.directory, state["pool"])
