"""Presets: the values of published algorithms, as data.

A preset sets algorithmic choices. Learning rates, batch sizes and lengths depend on model, task and hardware, so no preset sets them. Each
value names the place in the paper that it comes from: a section or equation, or in words where its number is not certain or differs between
versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ESTIMATOR = "algorithm.advantage_estimator"
LOW, HIGH = "algorithm.eps_clip", "algorithm.eps_clip_high"
AGGREGATION = "algorithm.loss_aggregation"
KL_LOSS, KL_TYPE = "algorithm.kl_loss_coef", "algorithm.kl_loss_type"
FILTER = "rollout.dynamic_sampling_filter_path"


@dataclass(frozen=True)
class Preset:
    """One published algorithm.

    Attributes:
        paper: identifier of the paper.
        values: option path -> (value, place in the paper).
        left: further parts of the paper that the preset does not set.
    """

    paper: str
    values: Mapping[str, tuple[Any, str]]
    left: str = ""


PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "arXiv 2402.03300",
        {
            ESTIMATOR: ("grpo", "section 4.1.2"),
            AGGREGATION: ("rollout_mean", "section 4.1.1, equation 3"),
            KL_LOSS: (0.04, "section 4.2"),
            KL_TYPE: ("k3", "section 4.1.1, equation 4"),
        },
        "the clip, whose width the paper does not state: --eps-clip",
    ),
    "dapo": Preset(
        "arXiv 2503.14476",
        {
            ESTIMATOR: ("grpo", "section 2.2"),
            LOW: (0.2, "section 4.1"),
            HIGH: (0.28, "section 3.1 and 4.1"),
            FILTER: ("nonzero_std", "section 3.2"),
            AGGREGATION: ("token_mean", "section 3.3"),
            KL_LOSS: (0.0, "section 2.3"),
        },
        "soft over-length penalty (section 3.4): --overlong-buffer-len, a fifth of the longest response in section 4.1",
    ),
    "dr-grpo": Preset(
        "arXiv 2503.20783",
        {
            ESTIMATOR: ("dr_grpo", "section 3.2"),
            AGGREGATION: ("constant", "section 3.2"),
            KL_LOSS: (0.0, "section 3"),
        },
    ),
    "gspo": Preset(
        "arXiv 2507.18071",
        {
            ESTIMATOR: ("gspo", "section 4.1"),
            LOW: (3e-4, "section 5.1"),
            HIGH: (4e-4, "section 5.1"),
            AGGREGATION: ("rollout_mean", "section 4.1, equation 5"),
            KL_LOSS: (0.0, "equation 5 has no KL; its authors confirm 0 in pull request 2775 of verl"),
        },
        "four optimizer steps per rollout (section 5.1): --num-steps-per-rollout 4",
    ),
    "cispo": Preset(
        "arXiv 2506.13585",
        {
            ESTIMATOR: ("cispo", "section 3.1"),
            AGGREGATION: ("token_mean", "section 3.1, equation 4"),
            FILTER: ("nonzero_std", "section 3.1"),
            KL_LOSS: (0.0, "section 3.1"),
        },
        "the upper bound of the ratio, which the paper tunes and does not state: --eps-clip-high; DAPO's penalty of long responses: "
        "--overlong-buffer-len",
    ),
    "reinforce++": Preset(
        "arXiv 2501.03262",
        {
            ESTIMATOR: ("reinforce_plus_plus", "equations 8 to 10 of version 2"),
            "algorithm.gamma": (1.0, "section 4.2.3 of version 2"),
        },
        "a KL in the reward, 0.001 in section 4.2.3 of version 2: --kl-coef",
    ),
    "gmpo": Preset(
        "arXiv 2507.20673",
        {
            ESTIMATOR: ("gmpo", "its objective"),
            "objectives.gmpo_clip": (0.4, "section 4"),
            AGGREGATION: ("rollout_mean", "its objective"),
        },
    ),
    "sapo": Preset(
        "arXiv 2511.20347",
        {
            ESTIMATOR: ("sapo", "its objective"),
            "objectives.sapo_tau_positive": (1.0, "its experiments"),
            "objectives.sapo_tau_negative": (1.05, "its experiments"),
            AGGREGATION: ("rollout_mean", "its objective"),
        },
    ),
}


def describe(name: str) -> str:
    """Describe a preset for a plan: each value with its origin."""
    preset = PRESETS[name]
    lines = [f"--preset {name}: {preset.paper}"]
    lines += [f"  {path} = {value} ({section})" for path, (value, section) in preset.values.items()]
    return "\n".join([*lines, f"  not set: {preset.left}"] if preset.left else lines)


def because(name: str, path: str) -> str:
    """Describe the source of a preset's value, for plans that refuse another value."""
    preset = PRESETS[name]
    return (
        f"--preset {name} takes this value from {preset.paper}, {preset.values[path][1]}; leave your value out, or give the options of the "
        "preset that you want instead of --preset"
    )
