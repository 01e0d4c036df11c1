"""Adaptive KL coefficient (Ziegler et al., arXiv 1909.08593, section 2.2).

After each rollout of n samples with the measured KL to the reference model, the coefficient beta changes in proportion to the error:

    e = clip(KL / target - 1, -0.2, 0.2)
    beta = beta (1 + e n / horizon)

The paper writes K_beta = 0.1 for n / horizon; the horizon in samples, 10,000, is that of its published code. KL is the mean over trained
tokens of the k3 estimate, in nats (metric ``train/ref_kl``), where the paper sums over a response: divide its target by the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.data import Sample
from miles_core.plugin import Policy, Run, hookimpl
from miles_core.trainer import LearnerHandle
from miles_objectives.config import ObjectivesConfig

KL = "train/ref_kl"
#: Options whose coefficient may be adapted; a plan has exactly one of them above 0.
PATHS = ("algorithm.kl_coef", "algorithm.kl_loss_coef")
#: Bound of the relative error.
LARGEST = 0.2


def next_coefficient(beta: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return the coefficient after a rollout of ``samples`` samples whose mean KL per token was ``kl`` nats."""
    error = min(max(kl / target - 1.0, -LARGEST), LARGEST)
    return beta * (1.0 + error * samples / horizon)


class AdaptiveKl:
    """Adapts the KL coefficient of each policy.

    Attributes:
        values: policy name -> current coefficient, as far as it differs from the option.
    """

    def __init__(self, options: ObjectivesConfig) -> None:
        self.values: dict[str, float] = {}
        #: coefficients that the trainers have, which a resume does not restore
        self._configured: dict[str, float] = {}

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Callable[[Any], Any] | None:
        config = run.config_of(policy)
        options: ObjectivesConfig = config.plugin("objectives")
        target, name, handle = options.kl_target, policy.name, handles[policy.name]
        path = next((each for each in PATHS if config.get(each)), None)
        if target is None or path is None:
            return None
        start = float(config.get(path))

        def wrap(inner: Any) -> Any:
            async def learn(samples: Sequence[Sample], step: int) -> Any:
                beta = self.values.setdefault(name, start)
                if self._configured.get(name, start) != beta:
                    await handle.configure({path: beta})
                    self._configured[name] = beta
                learned = await inner(samples, step)
                if KL in learned.metrics:
                    learned.metrics["objectives/kl_coef"] = beta
                    self.values[name] = next_coefficient(
                        beta, learned.metrics[KL], target, len(samples), options.kl_horizon
                    )
                return learned

            return learn

        return wrap

    @hookimpl
    def on_save(self, policy: Policy | None, store: Any) -> None:
        if policy is None:
            store.put("adaptive_kl", data=self.values)

    @hookimpl
    def on_load(self, policy: Policy | None, store: Any) -> None:
        if policy is None and "adaptive_kl" in store:
            self.values = {name: float(value) for name, value in store.get("adaptive_kl")[1].items()}
