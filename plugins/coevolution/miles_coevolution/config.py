"""Options of the plugin."""

from dataclasses import dataclass

from miles_core.plugin import option

#: Past versions that a policy without any other opponent plays against.
ALONE = 1
#: Rollout function -> names of the policies that its roles need. Other games are played by any policies.
ROLES = {"proposer": ("proposer", "solver")}
#: Name after ``mutate`` -> path of the option.
MUTABLE = {
    "lr": "train.lr",
    "min_lr": "train.min_lr",
    "weight_decay": "train.weight_decay",
    "clip_grad": "train.clip_grad",
    "eps_clip": "algorithm.eps_clip",
    "eps_clip_high": "algorithm.eps_clip_high",
    "entropy_coef": "algorithm.entropy_coef",
    "kl_loss_coef": "algorithm.kl_loss_coef",
}


@dataclass(frozen=True, kw_only=True)
class CoevolutionConfig:
    """Policies that learn by playing with or against each other."""

    strategy: str = option(
        "alternating",
        flag="--co-evolution-strategy",
        help="alternating: one side learns at a time; simultaneous: all sides learn in every step",
        choices=("alternating", "simultaneous"),
        enables=True,
    )
    interval: int = option(
        1,
        flag="--co-evolution-interval",
        help="steps of a phase; a round is one phase of each side (alternating) or one phase (simultaneous)",
        ge=1,
    )
    population_size: int | None = option(
        None,
        flag="--co-evolution-population-size",
        help="members of each side, with selection and mutation after each round (default: one, without selection)",
        ge=1,
        fixed=True,
    )
    mutate: tuple[str, ...] = option(
        ("lr",),
        flag="--co-evolution-mutate",
        help="options of the members that vary and mutate",
        choices=tuple(MUTABLE),
        only_if="coevolution.population_size > 1",
    )
    past_versions: int | None = option(
        None,
        flag="--co-evolution-past-versions",
        help="versions of each side that are kept as opponents, one more after each round "
        "(default: 1 for a policy without any other opponent, else 0)",
        ge=0,
    )
    past_probability: float = option(
        0.5,
        flag="--co-evolution-past-probability",
        help="fraction of the games in which one player is a past version of its side",
        gt=0,
        le=1,
        only_if="coevolution.past_versions != 0",
    )
    attempts: int = option(
        4,
        flag="--co-evolution-attempts",
        help="times that the solver answers each task of --generate proposer",
        ge=2,
        only_if="rollout.generate == proposer or rollout.generate_key",
    )


def count_past_versions(given: int | None, sides: int, population_size: int | None, generate: object) -> int:
    """Return the number of past versions of each side: ``given``, or one if a single policy has no other opponent.

    Args:
        given: the option ``past_versions``.
        sides: number of policies that train, without further members.
        population_size: the option ``population_size``.
        generate: the rollout function.
    """
    if given is not None:
        return given
    return ALONE if sides == 1 and population_size is None and str(generate) not in ROLES else 0
