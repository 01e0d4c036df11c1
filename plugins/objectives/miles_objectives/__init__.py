"""Presets of published algorithms, additional policy losses, and several rewards per sample, for miles-core."""

from miles_core.data import Field
from miles_core.plugin import Panel, Plugin, Rule, Set
from miles_objectives.config import ESTIMATORS, ObjectivesConfig
from miles_objectives.presets import PRESETS, because, describe

__version__ = "0.1.0"

_OWN = f"algorithm.advantage_estimator in {{{', '.join(ESTIMATORS)}}}"


def _settings() -> dict[str, tuple[Set, ...]]:
    found: dict[str, tuple[Set, ...]] = {}
    for name, preset in PRESETS.items():
        for path, (value, _) in preset.values.items():
            found[path] = (*found.get(path, ()), Set(value, f"objectives.preset == {name}", because(name, path)))
    return found


plugin = Plugin(
    name="objectives",
    summary="presets of published algorithms; the losses GMPO, SAPO, DPPO, DRO; GDPO for several rewards; adaptive KL",
    version=__version__,
    core="~=0.1",
    config=ObjectivesConfig,
    fields=(Field("reward_parts", "float64", "sample", shape=(None,)),),
    provides={"advantage": {name: f"miles_objectives.{name}:make_{name}" for name in ESTIMATORS}},
    sets=_settings(),
    notes={f"objectives.preset == {name}": describe(name) for name in PRESETS}
    | {
        "algorithm.advantage_estimator in {gmpo, sapo, dppo, dro} and "
        "(algorithm.eps_clip != 0.2 or algorithm.eps_clip_high or algorithm.eps_clip_c)": "no effect: --eps-clip, --eps-clip-high and "
        "--eps-clip-c, because the loss of this estimator has bounds of its own",
    },
    requires=(
        Rule(
            "rollout.n_samples_per_prompt >= 2",
            when=f"{_OWN} and rollout.custom_generate_function_path == none and rollout.generate == turn",
            because="its advantages compare the samples of one prompt, and with a single sample they are all 0",
        ),
        Rule(
            "algorithm.kl_coef == 0",
            when=_OWN,
            because="it has one advantage per sample, and a KL in the reward needs one per token; use --kl-loss-coef",
        ),
        Rule("algorithm.gamma == 1", when=_OWN, because="it has one advantage per sample, which no discount changes"),
        Rule(
            "objectives.gdpo_rewards",
            when="algorithm.advantage_estimator == gdpo",
            because="GDPO normalises these entries of the reward: --gdpo-rewards NAME[=WEIGHT],...",
        ),
        Rule(
            "algorithm.kl_coef > 0 or algorithm.kl_loss_coef > 0",
            when="objectives.kl_target",
            because="--kl-target adapts a coefficient, which needs a first value: --kl-coef or --kl-loss-coef",
        ),
        Rule(
            "algorithm.kl_coef == 0 or algorithm.kl_loss_coef == 0",
            when="objectives.kl_target",
            because="one measured KL adapts one coefficient: --kl-coef (in the reward) or --kl-loss-coef (in the loss)",
        ),
    ),
    hooks={
        "algorithm.advantage_estimator == gdpo": "miles_objectives.gdpo:RewardParts",
        "objectives.kl_target": "miles_objectives.adaptive_kl:AdaptiveKl",
    },
    panels=(
        Panel(
            "objectives_kl_coef",
            "KL coefficient that --kl-target adapts",
            {"*objectives/kl_coef": "*coefficient"},
            section="objectives",
            log=True,
        ),
    ),
)
