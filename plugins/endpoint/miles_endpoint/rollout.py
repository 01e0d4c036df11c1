"""The rollout function ``--generate endpoint``: one session and one agent per sample."""

from __future__ import annotations

import asyncio
import logging
import math
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_core.data import Sample, Status, number
from miles_core.plugin import ConfigError, DataError, GenerationClient, RolloutFunction
from miles_endpoint.agent import Agent, AgentFailed, Task, make_agent
from miles_endpoint.answer import AnswerReader
from miles_endpoint.conversation import REASONS
from miles_endpoint.server import Server
from miles_endpoint.service import Models
from miles_endpoint.session import Limits, Session

if TYPE_CHECKING:
    from miles_core.plugin import Run, Turn
    from miles_endpoint.config import EndpointConfig

log = logging.getLogger(__name__)

#: Counts of a session that are metrics: means per rollout.
COUNTS = (
    "conversations",
    *(f"branch_{reason}" for reason in REASONS),
    "tool_calls",
    "tool_errors",
    "replayed",
    "cancelled",
    "undelivered",
    "refused",
    "overridden",
)
#: Ways in which a sample fails; each is a metric.
FAILURES = ("crashed", "timed_out", "silent", "no_reward")
#: Number of failures of a run that are logged one by one; then every hundredth.
LOGGED = 20


class EndpointFunction(RolloutFunction):
    """Runs an agent for each sample.

    Args:
        agent: runs the agent.
        server: the endpoint.
        reader: reads answers of the model.
        limits: limits of a session.
        timeout: seconds that an agent may take, without the time in which it waits for the engine.
        needs_reward: whether a sample without a reward in the agent's result fails.
    """

    def __init__(
        self, agent: Agent, server: Server, reader: AnswerReader, limits: Limits, timeout: float, needs_reward: bool
    ) -> None:
        self.agent, self.server, self.reader, self.limits = agent, server, reader, limits
        self.timeout, self.needs_reward = timeout, needs_reward
        self._failed = 0

    async def start(self) -> None:
        await self.server.start()
        log.info("agents reach the run's model at %s", self.server.url)

    async def stop(self) -> None:
        await self.server.stop()
        self.agent.stop()

    async def __call__(self, sample: Sample, ask: GenerationClient) -> list[Sample]:
        session = Session(ask, self.reader, self.limits)
        token = self.server.open(session)
        why, result = "", None
        row = {"prompt": sample.prompt, "label": sample.label, "metadata": sample.metadata, "sample": sample.index}
        task = Task(row, self.server.url, token, sample.policy or "default")
        try:
            result = await self._run_agent(task, session)
            why, message = self._check_reward(result)
        except AgentFailed as error:
            why, message = "crashed", str(error)
        except TimeoutError:
            why, message = "timed_out", f"it took more than {self.timeout:g} seconds (--agent-timeout)"
        finally:
            seconds = (session.engine_seconds, session.agent_seconds)
            await self.server.close(token)
        if not why and not self._has_answers(session):
            why, message = "silent", "it ended without an answer of a trained policy"
        self._measure(session, why, seconds)
        return [self._fail(sample, why, message)] if why else self._samples(sample, session, result)

    async def _run_agent(self, task: Task, session: Session) -> Any:
        """Run the agent until it ends, its time is over, or an engine fails."""
        running = asyncio.ensure_future(self.agent.run(task))
        try:
            while not running.done():
                left = self.timeout - session.agent_seconds
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait((running, session.failure), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if session.failure.done():
                    session.failure.result()
            return running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _check_reward(self, result: Any) -> tuple[str, str]:
        """Return why the sample fails although its agent ended, and a message; ("", "") if it does not."""
        if self.needs_reward and (fault := _find_fault(reward_of(result))):
            return "no_reward", f"--rm-type agent: {fault}"
        return "", ""

    def _has_answers(self, session: Session) -> bool:
        """Return whether a sample can be made of the answers."""
        transcript = session.ask.transcript
        return any(transcript.learns(turn.policy) for leaf in transcript.leaves for turn in leaf.path)

    def _fail(self, sample: Sample, why: str, message: str) -> Sample:
        self._failed += 1
        if self._failed <= LOGGED or self._failed % 100 == 0:
            log.warning("sample %d fails (%s): the agent failed: %s", sample.index, why, message)
        sample.status = Status.FAILED
        sample.metadata = {**sample.metadata, "agent_failure": message}
        return sample

    def _measure(self, session: Session, why: str, seconds: tuple[float, float]) -> None:
        turns = session.ask.transcript.turns
        counts = session.counts
        metrics = {name: float(counts[name]) for name in COUNTS} | {name: float(name == why) for name in FAILURES}
        metrics["branches"] = float(sum(counts[f"branch_{reason}"] for reason in REASONS))
        metrics["engine_seconds"], metrics["agent_seconds"] = seconds
        if turns:
            metrics["tokens_per_turn"] = sum(len(turn.response.tokens) for turn in turns) / len(turns)
        session.ask.metrics |= {f"endpoint/{name}": value for name, value in metrics.items()}

    def _samples(self, sample: Sample, session: Session, result: Any) -> list[Sample]:
        """Make the samples of all leaves, each with the data about its turns for the report."""
        transcript = session.ask.transcript
        if isinstance(result, Mapping) or _is_number(result):
            sample.metadata = {
                **sample.metadata,
                "agent": dict(result) if isinstance(result, Mapping) else {"reward": result},
            }
        rewards = result.get("turn_rewards") if isinstance(result, Mapping) else None
        reward_of_turn = (
            dict(zip(map(id, transcript.turns), rewards, strict=False)) if isinstance(rewards, list) else {}
        )
        paths = {tuple(leaf.tokens): leaf.path for leaf in transcript.leaves}
        made = transcript.samples(sample)
        for one in made:
            path = paths[tuple(one.tokens)]
            first = len(path[0].prompt)
            one.metadata["turns"] = [self._describe(turn, first, session, reward_of_turn) for turn in path]
        return made

    def _describe(self, turn: Turn, first: int, session: Session, rewards: Mapping[int, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {"start": turn.start - first, "end": turn.end - first}
        answer = session.answers.get(id(turn))
        if answer is not None and answer.calls:
            shown["calls"] = [call["function"] for call in answer.calls]
        if answer is not None and answer.errors:
            shown["errors"] = answer.errors
        if _is_number(rewards.get(id(turn))):
            shown["reward"] = float(rewards[id(turn)])
        return shown


def reward_of(result: Any) -> Any:
    """Return the reward in an agent's result: the result itself if it is a number, or its entry ``reward``."""
    return result.get("reward") if isinstance(result, Mapping) else result


def _is_number(value: Any) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(number(value, None))
    except DataError:
        return False


def _find_fault(reward: Any) -> str:
    parts = list(reward.values()) if isinstance(reward, Mapping) else [reward]
    if not parts or not all(_is_number(part) for part in parts):
        return f"the agent's reward is {reward!r:.80}; its result must be a finite number, or an object with reward (a number, or numbers by name)"
    return ""


def make_generate(run: Run) -> EndpointFunction:
    """The provider of ``--generate endpoint``.

    Raises:
        ConfigError: the agent cannot be found, or the tokenizer has no chat template.
    """
    options: EndpointConfig = run.config.plugin("endpoint")
    renderer = run.render.renderer
    if renderer is None:
        raise ConfigError(
            f"--generate endpoint: the tokenizer of {run.config.model.hf_checkpoint} has no chat template, so an agent's messages cannot "
            "be rendered; add chat_template.jinja to the checkpoint"
        )
    assert options.agent is not None  # a rule of the manifest
    policies = {policy.name: policy.name for policy in run.policies}
    own = dict.fromkeys(("default", *options.models), "")
    frozen = frozenset(policy.name for policy in run.policies if policy.role == "frozen")
    context = run.config.rollout.max_context_len or run.plan.fact("model.context")
    limits = Limits(int(context) if context else None, options.max_turns)
    server = Server(Models(own | policies, frozen), options.host, options.port, options.max_body, options.url)
    return EndpointFunction(
        make_agent(options.agent),
        server,
        AnswerReader(renderer),
        limits,
        options.timeout,
        run.config.reward.rm_type == "agent",
    )


def make_reward() -> Any:
    """The provider of ``--rm-type agent``: the reward in the agent's result."""

    async def reward(args: Any, sample: Sample) -> Any:
        return sample.metadata["agent"]["reward"]

    return reward
