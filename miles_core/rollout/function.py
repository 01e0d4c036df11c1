"""Rollout functions: how the samples of one prompt are generated, from one turn to an agent with tools.

The provider of ``--generate NAME`` returns a ``RolloutFunction`` or an async function with the same arguments. It is called
once per sample and answers through ``ask``, which records every turn.
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
        roles: roles of the messages that it appends after the model's turns (``("tool",)``); before the run starts, the chat
            template is checked for them.
    """

    roles: tuple[str, ...] = ()

    async def start(self) -> None:
        """Bring up what all samples share (a server, a pool of sandboxes). Called before the first sample; again, after ``stop``,
        when the run recovers from a lost worker."""

    async def stop(self) -> None:
        """Release it, also where ``start`` failed. Called after the last sample, whatever ended the run."""

    @abstractmethod
    async def __call__(self, sample: Sample, ask: Ask) -> Sample | list[Sample]:
        """Generate; ``sample`` holds the prompt (``prompt``, ``tokens``, ``label``, ``metadata``).

        Many calls run at once. A call is cancelled when its sample is dropped: release what belongs to the sample in
        ``finally`` or with ``async with``; the run waits for that. Set ``status`` to FAILED where a tool failed, and the
        sample is not trained on; an exception ends the run.

        Returns:
            ``ask.transcript.samples(sample)``, or samples whose tokens are made of the turns' tokens.
        """


class PlainFunction(RolloutFunction):
    """An async function ``(sample, ask) -> samples`` as a rollout function."""

    def __init__(self, function: Callable[[Sample, Ask], Awaitable[Any]]) -> None:
        self.function = function

    async def __call__(self, sample: Sample, ask: Ask) -> Any:
        return await self.function(sample, ask)


class SingleTurn(RolloutFunction):
    """``--generate turn``: one answer to the prompt."""

    async def __call__(self, sample: Sample, ask: Ask) -> Sample:
        turn = await ask()
        sample.tokens = turn.tokens
        sample.response_length = len(turn.response.tokens)
        sample.response = turn.response.text
        return sample


def make_turn() -> SingleTurn:
    """The provider of ``--generate turn``."""
    return SingleTurn()


def rollout_function(made: Any, name: str) -> RolloutFunction:
    """What a provider of ``--generate`` returned, as a rollout function.

    Raises:
        PluginError: it is neither a ``RolloutFunction`` nor an async function.
    """
    if isinstance(made, RolloutFunction):
        return made
    if not inspect.iscoroutinefunction(made):
        raise PluginError(
            f"--generate {name}: its provider returned {made!r:.80}; return a RolloutFunction, or an async function (sample, ask)"
        )
    return PlainFunction(made)


def check_roles(run: Run, name: str, function: RolloutFunction) -> None:
    """The chat template can append the messages that ``function`` appends; what it does to earlier text is logged.

    Raises:
        ConfigError: there is no chat template, or it has no such role.
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
                "the chat template %s when a message of the role %s follows: such messages begin another branch of the conversation, "
                "which is rendered as a whole",
                what,
                role,
            )
