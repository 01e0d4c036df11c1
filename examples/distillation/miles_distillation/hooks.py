"""Where the teacher takes part in a run.

The teacher scores each rollout before the student learns from it. Its log-probabilities travel with the samples as fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer

from miles_core.data import CANDIDATES, Batch, Sample
from miles_core.plugin import ConfigError, MilesError, Policy, Run, hookimpl
from miles_core.trainer import AdvantageInputs, Context, Learned, LearnerHandle, Loss, Needs, Output
from miles_distillation import DistillationConfig
from miles_distillation.divergence import sampled_reverse_kl, top_k_reverse_kl

TEACHER, TOP = "teacher_log_probs", "teacher_top_log_probs"


class Distillation:
    """Has the teacher score samples and, with top-k, replaces the policy loss by the divergence."""

    def __init__(self, options: DistillationConfig) -> None:
        self.options = options

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Refuse a teacher that is missing or reads other tokens."""
        teacher = self.teacher(run)
        source = teacher.hf_checkpoint or run.config.model.hf_checkpoint
        trusted = run.config_of(teacher).model.trust_remote_code
        if AutoTokenizer.from_pretrained(source, trust_remote_code=trusted).get_vocab() != run.tokenizer.get_vocab():
            raise ConfigError(
                f"the teacher {teacher.name} ({source}) has another vocabulary than the student ({run.config.model.hf_checkpoint}), so "
                "it cannot score the student's tokens; choose a teacher with the student's tokenizer"
            )

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Callable:
        teacher, k = handles[self.teacher(run).name], self.options.top_k

        def wrap(inner: Callable) -> Callable:
            async def learn(samples: Sequence[Sample], step: int) -> Learned:
                for sample, log_probs in zip(samples, await teacher.log_probs(samples), strict=True):
                    sample.fields[TEACHER] = log_probs
                if k:
                    for sample, top in zip(samples, await teacher.top_log_probs(samples, k), strict=True):
                        sample.fields |= {CANDIDATES.name: top.tokens, TOP: top.log_probs}
                return await inner(samples, step)

            return learn

        return wrap

    @hookimpl
    def wrap_loss(self, policy: Policy) -> Callable | None:
        if policy.role != "train":
            return None

        def wrap(inner: Callable) -> Callable:
            def loss(output: Output, batch: Batch, ctx: Context) -> Loss:
                found, mask = inner(output, batch, ctx), batch.mask.bool()
                if not mask.any():  # for example on a rank without samples, whose batch has no teacher either
                    return found
                gap = torch.where(mask, sampled_reverse_kl(output.log_probs.detach(), batch.column(TEACHER)), 0.0)
                metrics = found.metrics | {"distillation/reverse_kl": (gap.sum(), mask.sum())}
                return self.over_tokens(output, batch, metrics) if self.options.top_k else Loss(found.value, metrics)

            return loss

        return wrap

    def over_tokens(self, output: Output, batch: Batch, metrics: dict[str, tuple[Tensor, Tensor]]) -> Loss:
        """The divergence over the teacher's top-k tokens as the loss, with the policy loss's metrics but for its value."""
        if output.candidate_log_probs is None:
            raise MilesError(
                "the trainer returned no log-probabilities of the teacher's tokens (Output.candidate_log_probs), which "
                "--distillation-top-k compares; use --trainer embedded, or --distillation-top-k 0"
            )
        mask, weight = batch.mask.bool(), batch.column("loss_weight")
        kl = torch.where(mask, top_k_reverse_kl(output.candidate_log_probs, batch.column(TOP)), 0.0)
        value = (kl * weight).sum()
        metrics |= {"distillation/top_k_reverse_kl": (kl.detach().sum(), mask.sum())}
        return Loss(value, metrics | {"train/loss": (value.detach(), weight.sum())})

    def teacher(self, run: Run) -> Policy:
        """The policy to learn from."""
        frozen = {policy.name: policy for policy in run.policies if policy.role == "frozen"}
        name = self.options.teacher or (next(iter(frozen)) if len(frozen) == 1 else "")
        if name not in frozen:
            asked = f"--distillation-teacher {name}: no" if name else "distillation needs --distillation-teacher NAME:"
            raise ConfigError(
                f"{asked} frozen policy to choose; the configuration file has {', '.join(frozen) or 'none'}. Add one there, for example "
                "policies: {student: {}, teacher: {role: frozen, hf_checkpoint: DIR}}"
            )
        return frozen[name]


def make_advantage() -> Callable[[AdvantageInputs], Tensor]:
    """``--advantage-estimator distillation``: the negative divergence at the sampled token."""

    def distillation(inputs: AdvantageInputs) -> Tensor:
        assert inputs.batch is not None
        gap = sampled_reverse_kl(inputs.batch.column("old_log_probs"), inputs.batch.column(TEACHER))
        return torch.where(inputs.mask.bool(), -gap, 0.0)

    distillation.needs = Needs(old=True, whole_step=False, columns=(TEACHER,))  # type: ignore[attr-defined]
    return distillation


def make_reward() -> Callable:
    """``--rm-type nothing``: no reward, for runs in which the teacher alone teaches."""

    async def nothing(args: object, sample: Sample) -> float:
        return 0.0

    return nothing
