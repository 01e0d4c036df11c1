"""Hooks for the embedded backend: attach the draft to every model, and train it along with the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from miles_core.data import Batch, WeightUnit
from miles_core.plugin import hookimpl
from miles_core.trainer import Context, Output
from miles_embedded import is_embedded
from miles_speculative.config import SpeculativeConfig
from miles_speculative.draft import Draft
from miles_speculative.draft_model import attach_model
from miles_speculative.head import attach
from miles_speculative.training import DraftTraining


class EmbeddedSpeculative:
    """Attaches and trains the draft."""

    def __init__(self, options: SpeculativeConfig) -> None:
        self.options = options
        #: policy name -> its draft in this process's trainer
        self.drafts: dict[str, DraftTraining] = {}

    @hookimpl
    def on_model(self, run: Any, policy: Any, model: nn.Module, role: str) -> None:
        if role not in ("train", "rollout", "shared") or not is_embedded(model):
            return
        draft: Draft
        path = self.options.on(run.config.run.engine).draft_model_path
        if path is not None:
            draft = attach_model(model, path)
        else:
            start = run.config.model.ref_load or policy.hf_checkpoint or run.config.model.hf_checkpoint
            draft = attach(model, start)
        if role != "rollout":
            first_seen = run.config.run.engine == "embedded"
            self.drafts[policy.name] = DraftTraining(draft, self.options, run.config.rollout.temperature, first_seen)

    @hookimpl
    def on_batch(self, run: Any, policy: Any) -> None:
        every = self.options.reinit_interval
        if every is not None and policy.name in self.drafts and run.step and run.step % every == 0:
            self.drafts[policy.name].renew()

    @hookimpl
    def wrap_forward(self, run: Any, policy: Any) -> Any:
        draft = self.drafts.get(policy.name)
        if draft is None or not self.options.trained:
            return None

        def wrap(inner: Any) -> Any:
            def forward(chunk: Any, micro_batch: Batch, ctx: Context) -> Output:
                output: Output = inner(chunk, micro_batch, ctx)
                output.aux.update(draft.losses(micro_batch, ctx, run.step))
                return output

            return forward

        return wrap

    @hookimpl
    def wrap_optimizer_step(self, policy: Any) -> Any:
        draft = self.drafts.get(policy.name)
        if draft is None or not draft.means:
            return None

        def wrap(inner: Any) -> Any:
            def step() -> dict[str, float]:
                metrics: dict[str, float] = inner()
                draft.update_means()
                return metrics

            return step

        return wrap

    @hookimpl
    def wrap_weights(self, policy: Any) -> Any:
        draft = self.drafts.get(policy.name)
        if draft is None or not draft.means:
            return None

        def wrap(inner: Any) -> Any:
            def weights() -> Iterator[WeightUnit]:
                return draft.substitute_means(inner())

            return weights

        return wrap

    @hookimpl
    def on_save(self, policy: Any, store: Any) -> None:
        draft = None if policy is None else self.drafts.get(policy.name)
        if draft is not None and draft.means:
            store.put("speculative", draft.means)

    @hookimpl
    def on_load(self, policy: Any, store: Any) -> None:
        draft = None if policy is None else self.drafts.get(policy.name)
        if draft is not None and draft.means:
            saved, _ = store.get("speculative")
            for name, mean in draft.means.items():
                mean.copy_(saved[name])
