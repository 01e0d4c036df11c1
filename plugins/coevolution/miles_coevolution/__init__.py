"""Co-evolution: policies that learn by playing with or against each other, their past versions and whole populations."""

from miles_coevolution.config import CoevolutionConfig
from miles_core.plugin import Hint, Package, Panel, Plugin, Rule, above

__version__ = "0.1.0"

plugin = Plugin(
    name="coevolution",
    summary="policies that learn with or against each other: phases, past versions, populations with selection",
    version=__version__,
    core="~=0.1",
    config=CoevolutionConfig,
    hooks={"": "miles_coevolution.hooks:Coevolution"},
    provides={
        "generate": {
            "nim": "miles_coevolution.nim:make_generate",
            "proposer": "miles_coevolution.proposer:make_generate",
        },
        "prompts": {"nim": "miles_coevolution.nim:make_prompts", "tasks": "miles_coevolution.proposer:make_prompts"},
        "reward": {"game": "miles_coevolution.game:make_reward"},
    },
    packages=(
        Package(
            "reasoning-gym",
            ">=0.1.19",
            when="rollout.generate == proposer",
            install="pip install miles-plugin-coevolution[tasks]; --generate nim needs no package",
        ),
    ),
    requires=(
        Rule(
            needs="schedule == sync",
            because="a step's games belong to the players of that step: phases, past versions and selection change them between steps",
        ),
        Rule(
            needs="reward.reward_key == none",
            when="reward.rm_type == game",
            because="this reward is a number, and only a dict has entries",
        ),
    ),
    review="miles_coevolution.review:review",
    hints=(
        Hint(
            "co-evolution-oscillates",
            "coevolution/*/swing",
            above(0.2, steps=1),
            "{metric}: the win rate goes up and down by {percent} from phase to phase: the sides forget what they had learned against earlier "
            "opponents",
            "play past versions (--co-evolution-past-versions 8), lengthen the phases (--co-evolution-interval), use --co-evolution-strategy "
            "alternating, train a population (--co-evolution-population-size 4), or lower --lr",
        ),
        Hint(
            "co-evolution-dominance",
            "coevolution/dominance",
            above(0.9, steps=5),
            "{metric}: one side wins {percent} of the games, so the others see hardly any reward to learn from",
            "let the losing side learn longer (alternating phases), lower the lr of the winning side in its table of policies, or let it play "
            "past versions (--co-evolution-past-versions)",
        ),
    ),
    panels=(
        Panel(
            "coevolution_wins",
            "Wins",
            {"coevolution/*/win": "*", "coevolution/*/win_against_past": "* against the past"},
            "share of the games",
            percent=True,
        ),
        Panel("coevolution_scores", "Scores", {"coevolution/*/score": "*"}, "mean reward"),
        Panel("coevolution_members", "Scores of the members", {"coevolution/*/member_score": "*"}, "mean reward"),
        Panel("coevolution_lr", "Learning rates of the members", {"coevolution/*/lr": "*"}, log=True),
        Panel("coevolution_swing", "Swing of the win rates", {"coevolution/*/swing": "*"}, "change per phase"),
    ),
    toy={"co_evolution_strategy": "simultaneous", "policies": {"one": {}, "two": {}}},
)
