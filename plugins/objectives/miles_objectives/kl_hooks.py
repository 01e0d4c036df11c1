"""Hook of the adaptive KL coefficient: wraps each policy's ``learn`` in the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.data import Sample
from miles_core.plugin import Policy, Run, hookimpl
from miles_core.trainer import LearnerHandle
from miles_objectives.adaptive_kl import next_coefficient
from miles_objectives.config import ObjectivesConfig

KL = "train/ref_kl"
#: Options whose coefficient may be adapted; a plan has exactly one of them above 0.
PATHS = ("algorithm.kl_coef", "algorithm.kl_loss_coef")


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
