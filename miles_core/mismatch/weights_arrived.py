"""Checks after every weight sync that the engine computes with the weights that were sent.

The version that an engine reports is not sufficient: if one layer kept its older weights, the engine would report the new version, and
its scores could differ from the trainer's by less than the usual mismatch. Where the layout of the engine's weights is known (capability
``weight_checksums``), the checksums of both sides are compared, and an error names the tensors that differ. For any other engine that can
score, the scores of a few fixed tokens must change in the same way as the trainer's (``movement``).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from miles_core.errors import MismatchError
from miles_core.mismatch.at_sync import check_version
from miles_core.mismatch.movement import Scores, can_score
from miles_core.mismatch.probe import bare, probe, probe_prompts

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts

log = logging.getLogger(__name__)

#: First key of the fixed tokens, outside the range of the run's samples and of other probes.
_FIRST_KEY = 1 << 42
#: With ``--colocate``, where the trainer has to return to the device, scores are compared at the first syncs and then at this interval.
_FIRST, _PERIOD = 3, 8
#: Number of tensors that an error names.
_NAMED = 4


def make_check(run: Run) -> Callable[[PolicyParts], Awaitable[Mapping[str, float]]] | None:
    """Create the check named ``weights_arrived``; None with ``--no-self-check`` and without ``--verify-logprobs``."""
    return WeightsArrived(run) if run.config.model.self_check or run.config.run.verify_logprobs else None


class WeightsArrived:
    """Compares the weights in every engine of a policy with the weights that were sent to it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._earlier: dict[str, Scores] = {}
        self._syncs: dict[str, int] = {}

    async def __call__(self, parts: PolicyParts) -> dict[str, float]:
        """Check the last sync of a policy.

        Raises:
            MismatchError: an engine computes with other weights than were sent.
        """
        check_version(parts)
        if "weight_checksums" in parts.serving.capabilities:
            await self._compare_checksums(parts)
        elif not self._run.config.run.verify_logprobs:  # which looks at the scores of its own probes
            await self._compare_scores(parts)
        return {}

    async def _compare_checksums(self, parts: PolicyParts) -> None:
        sent = await parts.learner.sent_checksums()
        if not sent:
            return
        held = await parts.serving.weight_checksums(list(sent))
        for worker, found in held.items():
            if others := [name for name, value in found.items() if value != sent[name]]:
                engine = f"engine {self._run.config.run.engine}" + (f" ({worker})" if worker else "")
                names = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if others[_NAMED:] else "")
                raise MismatchError(
                    f"stale weights: version {parts.policy.version} was synced and the {engine} reports it, but {len(others)} of "
                    f"{len(found)} compared tensors in the memory that it computes with differ from those sent: {names}. The update "
                    "did not reach them, or something changed them afterwards; look at the transport, compare with another "
                    "(--transport copy), and without plugins that change the engine's model"
                )

    async def _compare_scores(self, parts: PolicyParts) -> None:
        run, name = self._run, parts.policy.name
        count = self._syncs[name] = self._syncs.get(name, 0) + 1
        if run.config.run.colocate and count > _FIRST and count % _PERIOD:
            return
        if not can_score(run, parts):
            if count == 1:
                log.info(
                    "the engine %s can neither compare checksums nor score: only its version is checked",
                    run.config.run.engine,
                )
            return
        last = self._earlier.get(name)
        if last is None:
            samples = [bare(s) for s in await probe(run, parts, probe_prompts(run), key=_FIRST_KEY)]
            self._earlier[name] = await Scores.measure(run, parts, samples)
        else:
            self._earlier[name] = now = await Scores.measure(run, parts, last.samples)
            last.check_movement(parts.policy, now)
