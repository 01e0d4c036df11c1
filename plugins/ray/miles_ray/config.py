"""The options of the plugin: number of processes, and the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugin import option
from miles_ray.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Placement of trainer and engines. On machines without a GPU the numbers count processes."""

    actor_num_nodes: int = option(
        1, flag="--actor-num-nodes", help="number of machines for the trainer", metavar="N", ge=1
    )
    actor_num_gpus_per_node: int = option(
        1, flag="--actor-num-gpus-per-node", help="trainer ranks per machine, with one GPU each", metavar="N", ge=1
    )
    rollout_num_gpus: int | None = option(
        None,
        flag="--rollout-num-gpus",
        help="GPUs of all engines together (default: the GPUs of one engine; with --colocate the trainer's GPUs)",
        metavar="N",
        ge=1,
    )
    rollout_num_gpus_per_engine: int = option(
        1,
        flag="--rollout-num-gpus-per-engine",
        help="GPUs of one engine; more than a machine has: the engine runs on several machines (SGLang)",
        metavar="N",
        ge=1,
    )
    share_policy_gpus: bool = option(
        False,
        flag="--share-policy-gpus",
        help="a critic and other policies after the first one use the GPUs of the first one, each process with memory of its own, "
        "instead of as many GPUs again",
    )
    address: str | None = option(
        None,
        flag="--ray-address",
        help="the cluster to join: HOST:PORT, or auto for the cluster running on this machine (default: RAY_ADDRESS, which "
        "ray job submit sets, else a new cluster on this machine that ends with the run)",
    )

    def sizes(self, colocate: bool) -> Sizes:
        """Return the numbers of processes and devices for these options."""
        ranks, per_engine = self.actor_num_nodes * self.actor_num_gpus_per_node, self.rollout_num_gpus_per_engine
        rollout = self.rollout_num_gpus or (ranks if colocate else per_engine)
        return Sizes(self.actor_num_nodes, self.actor_num_gpus_per_node, rollout // per_engine, per_engine, colocate)
