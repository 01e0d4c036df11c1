"""Making a run, and its log, from an accepted plan; nothing of it is built yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from miles_core.config.config import Config
from miles_core.config.policies import CHECKPOINT, GENERATES, ROLE
from miles_core.contracts.hooks import load_hooks
from miles_core.contracts.policy import Policy
from miles_core.contracts.run import Run
from miles_core.data.field import CANDIDATES, SAMPLING_SUPPORT
from miles_core.data.template import PromptTemplate
from miles_core.data.tokenizer import load_tokenizer
from miles_core.observe.hints import Hints, hints_of
from miles_core.observe.metrics import MetricLog, Sink
from miles_core.observe.progress import Progress
from miles_core.observe.timer import Profiler
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan
from miles_core.run.log import RunLog
from miles_core.run.rollouts import RolloutFiles


def make_run(config: Config, plan: Plan, manifests: Mapping[str, Plugin], directory: Path) -> Run:
    """The run that a plan describes, with nothing built yet and nothing written.

    Raises:
        CheckpointError, ConfigError: the checkpoint's tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(config.model.hf_checkpoint, config.model.trust_remote_code)
    return Run(
        config=config,
        plan=plan,
        hooks=load_hooks(plan, manifests, config),
        fields=(SAMPLING_SUPPORT, CANDIDATES, *(f for p in plan.plugins for f in manifests[p.name].fields)),
        directory=directory,
        tokenizer=tokenizer,
        render=PromptTemplate(tokenizer, config.data.apply_chat_template),
        policies=policies_of(config),
    )


def policies_of(config: Config) -> list[Policy]:
    """The policies that a configuration names, or the one of a run that names none."""
    start = config.model.hf_checkpoint or ""
    if not config.policies:
        return [Policy(hf_checkpoint=start)]
    return [
        Policy(
            hf_checkpoint=own.get(CHECKPOINT) or start,
            name=name,
            role=own.get(ROLE, "train"),
            generates=own.get(GENERATES),
            options={path: item for path, item in own.items() if path not in (ROLE, GENERATES, CHECKPOINT)},
        )
        for name, own in config.policies.items()
    ]


def make_log(run: Run, manifests: Mapping[str, Plugin], progress: Progress, start: int | None) -> RunLog:
    """The log of a run that starts at step ``start`` (None: anew), with the hints of every plugin in ``manifests``."""
    options, resume_step = run.config.run, -1 if start is None else start
    rollouts = RolloutFiles(run.directory, run.tokenizer, options.save_rollouts_size, resume_step)
    return RunLog(
        MetricLog(run.directory / "metrics.jsonl", resume_step=resume_step, sinks=sinks(run.config, run.directory)),
        progress,
        Hints(hints_of(manifests.values(), run.plan.holds)),
        Profiler(options.profile_dir or run.directory / "profile", count=int(options.profile)),
        rollouts if options.save_rollouts else None,
    )


def sinks(config: Config, directory: Path) -> list[Sink]:
    """The further places metrics go to."""
    found: list[Sink] = []
    if config.run.use_tensorboard:
        from miles_core.observe.sinks import TensorBoard

        found.append(TensorBoard(directory / "tensorboard"))
    if config.run.use_wandb:
        from miles_core.observe.sinks import WeightsAndBiases

        options = config.run
        name = options.wandb_name or directory.absolute().name
        found.append(WeightsAndBiases(directory, name, vars(config.args), options.wandb_project, options.wandb_group))
    return found
