"""Creates a run and its log from an accepted plan. The policy parts are built later (see ``parts``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from miles_core.config.config import Config
from miles_core.config.policies import CHECKPOINT, GENERATES, ROLE
from miles_core.contracts.hooks import load_hooks
from miles_core.contracts.run import Policy, Run
from miles_core.data.field import CANDIDATES, SAMPLING_SUPPORT
from miles_core.data.prompts import PromptTemplate, parse_variables
from miles_core.data.tokenizer import load_tokenizer
from miles_core.observe.hints import Hints, hints_of
from miles_core.observe.metrics import MetricLog, Sink
from miles_core.observe.progress import Progress
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan
from miles_core.run.log import RunLog


def make_run(config: Config, plan: Plan, manifests: Mapping[str, Plugin], directory: Path) -> Run:
    """Create the run of a plan without building policy parts or writing files.

    Raises:
        CheckpointError, ConfigError: the checkpoint's tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(config.model.hf_checkpoint, config.model.trust_remote_code)
    run = Run(
        config=config,
        plan=plan,
        hooks=load_hooks(plan, manifests, config),
        fields=(SAMPLING_SUPPORT, CANDIDATES, *(f for p in plan.plugins for f in manifests[p.name].fields)),
        directory=directory,
        tokenizer=tokenizer,
        render=PromptTemplate(
            tokenizer, config.data.apply_chat_template, parse_variables(config.data.chat_template_kwargs)
        ),
        policies=policies_of(config),
    )
    if config.data.media:
        run.render.media = run.hooks.make("media", run.hooks.find_provided("media")[0], run=run)
        if run.render.renderer is not None:
            run.render.renderer.expand = run.render.media
    return run


def policies_of(config: Config) -> list[Policy]:
    """Return the configured policies, or a single default policy if none is configured."""
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
    """Create the log of a run. ``start`` is the step of the checkpoint to resume from, None for a new run; the hints of all
    ``manifests`` are active."""
    resume_step = -1 if start is None else start
    metrics = MetricLog(run.directory / "metrics.jsonl", resume_step=resume_step, sinks=make_sinks(run))
    log = RunLog(metrics, progress, Hints(hints_of(manifests.values(), run.plan.holds)))
    for sink in log.sample_sinks:
        sink.roll_back(resume_step)
    return log


def make_sinks(run: Run) -> list[Sink]:
    """Make the metric sinks that plugins provide and the run's options choose."""
    made = (run.hooks.make("sink", name, run=run) for name in run.hooks.find_provided("sink"))
    return [sink for sink in made if sink is not None]


def packages(plan: Plan, manifests: Mapping[str, Plugin]) -> set[str]:
    """Return the import packages that take part in a run: those of its plugins' hooks and parts, and of standard parts."""
    taking_part = [plugin for name, plugin in manifests.items() if plugin.standard or name in plan.order]
    targets = [target for plugin in taking_part for parts in plugin.provides.values() for target in parts.values()]
    return {target.partition(":")[0].partition(".")[0] for target in (*targets, *(hook.target for hook in plan.hooks))}
