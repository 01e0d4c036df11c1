"""Trainer ranks and engines as actors of a Ray cluster, for miles-core."""

from miles_core.plugin import Package, Plugin, Rule
from miles_ray.config import RayConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="ray",
    summary="trainer ranks and engines in separate processes, on one machine or many, placed by Ray",
    version=__version__,
    core="~=0.1",
    config=RayConfig,
    provides={"runtime": {"ray": "miles_ray.runtime:RayRuntime"}},
    capabilities={"runtime": ("remote", "rollout_workers")},
    packages=(Package("ray", ">=2.50", install="pip install 'ray>=2.50'"),),
    review="miles_ray.review:review",
    requires=(
        Rule(needs="runtime == ray", because="the plugin is a runtime; its options place the processes"),
        Rule(
            "not colocate",
            when="ray.share_policy_gpus",
            because="with --colocate an engine takes turns with the trainer of its own policy, and the other policies' processes would keep their "
            "memory meanwhile; give engines GPUs of their own, or each policy",
        ),
    ),
)
