"""Options of the plugin."""

from dataclasses import dataclass

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """On-policy distillation."""

    teacher: tuple[str, ...] = option(
        (),
        flag="--distillation-teacher",
        help="the frozen policies to learn from (default: the only one)",
        metavar="NAME",
    )
    weights: tuple[float, ...] = option(
        (),
        flag="--distillation-weights",
        help="weight of each teacher's divergence (default: equal); divided by their sum",
        metavar="W",
        ge=0,
    )
    teacher_key: str = option(
        "",
        flag="--distillation-teacher-key",
        help="metadata entry of a prompt that names its only teacher, for example a teacher per subject",
        metavar="KEY",
    )
    coef: float = option(
        1.0,
        flag="--distillation-coef",
        help="factor of the divergence next to the loss from rewards",
        ge=0,
    )
    top_k: int = option(
        0,
        flag="--distillation-top-k",
        help="compare the distributions over the teacher's K most probable tokens and all others together; 0 compares the "
        "sampled token only",
        ge=0,
    )
    score_with: str = option(
        "trainer",
        flag="--distillation-score-with",
        help="the part of a teacher that scores samples: its trainer, or its engine (generates: true)",
        choices=("trainer", "engine"),
    )
    refresh_interval: int = option(
        0,
        flag="--distillation-refresh-interval",
        help="self-distillation: the teacher receives the student's weights every N steps; 0 keeps its own",
        ge=0,
    )
