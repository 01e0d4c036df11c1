"""Hooks of distillation: teachers score each rollout before the student learns from it. Their log-probabilities are attached to the samples
as fields.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers import AutoTokenizer

from miles_core.data import CANDIDATES, Batch, Sample
from miles_core.engine import Engine
from miles_core.plugin import ConfigError, MilesError, Policy, Run, hookimpl
from miles_core.trainer import AdvantageInputs, Context, Learned, LearnerHandle, Loss, LossFunction, Needs, Output
from miles_distillation.config import DistillationConfig
from miles_distillation.divergence import sampled_reverse_kl, top_k_reverse_kl
from miles_distillation.review import choose_teachers, describe_difference
from miles_distillation.teachers import Teacher, Teachers

TEACHER, TOP = "teacher_log_probs", "teacher_top_log_probs"
F = TypeVar("F")
Wrap = Callable[[F], F]
Learn = Callable[[Sequence[Sample], int], Awaitable[Learned]]
#: Estimator whose advantages are the negative divergence, for runs without rewards.
ESTIMATOR = "distillation"


class Distillation:
    """Lets teachers score samples, and adds the divergence to the loss."""

    def __init__(self, options: DistillationConfig) -> None:
        self.options = options

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Refuse a teacher that is missing or has another tokenizer (the plan cannot read every tokenizer), and set which student a past
        version follows."""
        student = next(policy.name for policy in run.policies if policy.role == "train")
        for teacher in self.teachers(run):
            if self.options.refresh_interval:
                teacher.follows = student
            source = teacher.hf_checkpoint or run.config.model.hf_checkpoint
            if source == run.config.model.hf_checkpoint:
                continue
            trusted = run.config_of(teacher).model.trust_remote_code
            theirs = AutoTokenizer.from_pretrained(source, trust_remote_code=trusted).get_vocab()
            if theirs != run.tokenizer.get_vocab():
                raise ConfigError(
                    f"the teacher {teacher.name} ({source}) has another vocabulary than the student "
                    f"({run.config.model.hf_checkpoint}): {describe_difference(run.tokenizer.get_vocab(), theirs)}; choose a teacher with "
                    "the student's tokenizer"
                )

    @hookimpl
    def wrap_learn(
        self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle], engines: Mapping[str, Engine]
    ) -> Wrap[Learn]:
        options = self.options
        members = [
            Teacher(p.name, handles[p.name], self.engine(p, engines), run.config_of(p).rollout.temperature)
            for p in self.teachers(run)
        ]
        vocabulary = int(run.plan.fact("model.vocab_size") or len(run.tokenizer))
        teachers = Teachers(members, options.weights, options.teacher_key, options.top_k, vocabulary)

        def wrap(inner: Learn) -> Learn:
            async def learn(samples: Sequence[Sample], step: int) -> Learned:
                scored = await teachers.score(samples)
                for sample, found in zip(samples, scored, strict=True):
                    sample.fields[TEACHER] = found.log_probs
                    if found.tokens is not None:
                        sample.fields |= {CANDIDATES.name: found.tokens, TOP: found.top_log_probs}
                learned: Learned = await inner(samples, step)
                if options.refresh_interval and (step + 1) % options.refresh_interval == 0:
                    await refresh(run, handles[policy.name], [member.handle for member in members])
                return learned

            return learn

        return wrap

    @hookimpl
    def wrap_loss(self, run: Run, policy: Policy) -> Wrap[LossFunction] | None:
        if policy.role != "train":
            return None
        rewarded = run.config_of(policy).algorithm.advantage_estimator != ESTIMATOR

        def wrap(inner: LossFunction) -> LossFunction:
            def loss(output: Output, batch: Batch, ctx: Context) -> Loss:
                found, mask = inner(output, batch, ctx), batch.mask.bool()
                if (
                    output.log_probs is None or not mask.any()
                ):  # for example on a rank without samples, whose batch has no teacher either
                    return found
                gap = torch.where(mask, sampled_reverse_kl(output.log_probs.detach(), batch.column(TEACHER)), 0.0)
                found.metrics["distillation/reverse_kl"] = (gap.sum(), mask.sum())
                if not self.options.top_k:
                    return self.add(found, sampled_loss(output, batch, gap), batch) if rewarded else found
                kl = self.over_tokens(output, batch, found)
                if rewarded:
                    return self.add(found, kl, batch)
                value = (kl * batch.column("loss_weight")).sum()
                return Loss(value, found.metrics | {"train/loss": (value.detach(), batch.column("loss_weight").sum())})

            return loss

        return wrap

    def add(self, found: Loss, tokens: Tensor, batch: Batch) -> Loss:
        """Add the divergence of each token, times the coefficient, to the loss from rewards."""
        weight = batch.column("loss_weight")
        value = found.value + self.options.coef * (tokens * weight).sum()
        return Loss(value, found.metrics | {"train/loss": (value.detach(), weight.sum())})

    def over_tokens(self, output: Output, batch: Batch, found: Loss) -> Tensor:
        """The divergence over the teachers' top-k tokens at each position, [tokens] with gradient; adds its metrics."""
        if output.candidate_log_probs is None:
            raise MilesError(
                "the trainer returned no log-probabilities of the teacher's tokens (Output.candidate_log_probs), which "
                "--distillation-top-k compares; use --trainer embedded, or --distillation-top-k 0"
            )
        mask, k = batch.mask.bool(), self.options.top_k
        student, teacher = output.candidate_log_probs, batch.column(TOP)
        count = student.shape[-1] // k
        weights = self.options.weights if count > 1 and self.options.weights else (1.0,) * count
        total, kl = sum(weights), torch.zeros_like(output.log_probs)  # type: ignore[arg-type]
        for part, weight in enumerate(weights):
            own = slice(part * k, (part + 1) * k)
            kl = kl + weight / total * top_k_reverse_kl(student[:, own], teacher[:, own])
        kl = torch.where(mask, kl, 0.0)
        mass = torch.where(mask, student[:, :k].detach().exp().sum(-1), 0.0)
        found.metrics["distillation/top_k_reverse_kl"] = (kl.detach().sum(), mask.sum())
        found.metrics["distillation/top_k_mass"] = (mass.sum(), mask.sum())
        return kl

    def teachers(self, run: Run) -> list[Policy]:
        """The policies to learn from."""
        frozen = {policy.name: policy for policy in run.policies if policy.role == "frozen"}
        names = choose_teachers(tuple(frozen), self.options.teacher)
        if not names or {*names} - {*frozen}:  # the plan refuses this unless a plugin added the policies
            raise ConfigError(
                f"distillation needs frozen policies as its teachers; the run has {', '.join(frozen) or 'none'} and "
                f"--distillation-teacher names {', '.join(self.options.teacher) or 'none'}"
            )
        return [frozen[name] for name in names]

    def engine(self, teacher: Policy, engines: Mapping[str, Engine]) -> Engine | None:
        """The engine that scores for ``teacher``; None if its trainer does."""
        if self.options.score_with != "engine":
            return None
        engine = engines.get(teacher.name)
        if engine is None or "score" not in engine.capabilities:
            raise ConfigError(
                f"--distillation-score-with engine: the teacher {teacher.name} has no engine that can score a given text (capability "
                "score); use --distillation-score-with trainer"
            )
        return engine


def sampled_loss(output: Output, batch: Batch, gap: Tensor) -> Tensor:
    """Return the loss [tokens] of a policy-gradient step that lowers the divergence: at each sampled token, ``gap`` (the log-ratio of
    student to teacher) is the cost. It is multiplied by the importance ratio to the policy that sampled the token (1 in the first optimiser
    step) and by the run's correction weights, if there are any."""
    assert output.log_probs is not None
    old = batch.column("old_log_probs") if "old_log_probs" in batch.columns else output.log_probs.detach()
    ratio = torch.where(batch.mask.bool(), (output.log_probs - old).clamp(-20.0, 20.0).exp(), 0.0)
    return ratio * gap * (batch.column("correction") if "correction" in batch.columns else 1.0)


async def refresh(run: Run, student: LearnerHandle, teachers: Sequence[LearnerHandle]) -> None:
    """Copy the student's weights to its teachers."""
    directory = run.directory / "distillation"
    shutil.rmtree(directory, ignore_errors=True)
    await student.save(directory)
    for teacher in teachers:
        await teacher.load(directory)
    shutil.rmtree(directory)


def make_advantage() -> Callable[[AdvantageInputs], Tensor]:
    """``--advantage-estimator distillation``: the negative divergence at the sampled token."""

    def distillation(inputs: AdvantageInputs) -> Tensor:
        assert inputs.batch is not None
        gap = sampled_reverse_kl(inputs.batch.column("old_log_probs"), inputs.batch.column(TEACHER))
        return torch.where(inputs.mask.bool(), -gap, 0.0)

    distillation.needs = Needs(old=True, whole_step=False, columns=(TEACHER,))  # type: ignore[attr-defined]
    return distillation


def make_reward() -> Callable[[object, Sample], Awaitable[float]]:
    """``--rm-type nothing``: no reward, for runs that learn only from teachers."""

    async def nothing(args: object, sample: Sample) -> float:
        return 0.0

    return nothing
