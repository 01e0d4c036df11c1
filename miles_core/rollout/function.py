"""Rollout functions generate the samples of a prompt: with a single turn, or as an agent with tools.

The provider of ``--generate NAME`` returns a ``RolloutFunction`` or an async function with the same arguments. The function
is called once per sample and sends its requests through ``ask``, which records every turn.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, PluginError
from miles_core.rollout.ask import Ask

if TYPE_CHECKING:
    from miles_core.contracts.run import Run


log = logging.getLogger(__name__)

#: The rollout function of core: ``--generate turn``.
TURN = "turn"


class RolloutFunction(ABC):
    """Generates the samples of one prompt.

    Attributes:
        roles: roles of the messages that the function appends after the model's turns, such as ``("tool",)``. The run checks at
            start that the chat template supports them.
    """

    roles: tuple[str, ...] = ()

    async def start(self) -> None:
        """Start resources that all samples share (a server, a pool of sandboxes). Called before the first sample, and again after
        ``stop`` when the run recovers from a lost worker."""

    async def stop(self) -> None:
        """Release the shared resources. Called after the last sample however the run ends, and also if ``start`` failed."""

    @abstractmethod
    async def __call__(self, sample: Sample, ask: Ask) -> Sample | list[Sample]:
        """Generate the samples of one prompt; ``sample`` holds the prompt (``prompt``, ``tokens``, ``label``, ``metadata``).

        Many calls run concurrently. A call is cancelled when its sample is dropped: release the sample's resources in ``finally``
        or with ``async with``; the run waits for the release. If a tool fails, set ``status`` to FAILED: the sample is then not
        trained on. An exception ends the run.

        Returns:
            ``ask.transcript.samples(sample)``, or samples whose tokens are concatenated from the tokens of turns.
        """


class PlainFunction(RolloutFunction):
    """Adapts an async function ``(sample, ask) -> samples`` to a rollout function."""

    def __init__(self, function: Callable[[Sample, Ask], Awaitable[Any]]) -> None:
        self.function = function

    async def __call__(self, sample: Sample, ask: Ask) -> Any:
        return await self.function(sample, ask)


class SingleTurn(RolloutFunction):
    """``--generate turn``: generates one response to the prompt."""

    async def __call__(self, sample: Sample, ask: Ask) -> Sample:
        turn = await ask()
        sample.tokens = turn.tokens
        sample.response_length = len(turn.response.tokens)
        sample.response = turn.response.text
        return sample


def make_turn() -> SingleTurn:
    """The provider of ``--generate turn``."""
    return SingleTurn()


def to_rollout_function(made: Any, name: str) -> RolloutFunction:
    """Convert the value that the provider of ``--generate`` returned to a rollout function.

    Raises:
        PluginError: the value is neither a ``RolloutFunction`` nor an async function.
    """
    if isinstance(made, RolloutFunction):
        return made
    if not inspect.iscoroutinefunction(made):
        raise PluginError(
            f"--generate {name}: its provider returned {made!r:.80}; return a RolloutFunction, or an async function (sample, ask)"
        )
    return PlainFunction(made)


def check_roles(run: Run, name: str, function: RolloutFunction) -> None:
    """Check that the chat template supports the roles of ``function``; log a warning if appending a message changes earlier text.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not support a role.
    """
    renderer = run.render.renderer
    for role in function.roles:
        if renderer is None:
            raise ConfigError(
                f"--generate {name} appends messages of the role {role}, and the tokenizer of {run.config.model.hf_checkpoint} has no chat "
                "template; add chat_template.jinja to the checkpoint"
            )
        effect = renderer.examine(role)
        if effect == "refuses":
            raise ConfigError(
                f"--generate {name} appends messages of the role {role}, and the chat template of {run.config.model.hf_checkpoint} refuses "
                "them; use a model whose template has this role"
            )
        if effect != "appends":
            what = "removes the reasoning of earlier answers" if effect == "drops reasoning" else "changes earlier text"
            log.warning(
                "the chat template %s when a message of the role %s follows: such a message starts a new branch, for which the "
                "whole conversation is rendered again",
                what,
                role,
            )
