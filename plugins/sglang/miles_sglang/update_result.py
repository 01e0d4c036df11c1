"""Checks of SGLang's answers to weight updates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from miles_core.plugin import MilesError, MismatchError

log = logging.getLogger(__name__)


def check_accepted(answer: Mapping[str, Any]) -> None:
    """Check that SGLang accepted an update or one of its buckets.

    Args:
        answer: SGLang's answer with ``success`` and ``message``.

    Raises:
        MilesError: SGLang rejected it; its weights may be partly overwritten.
    """
    if not answer["success"]:
        raise MilesError(
            f"SGLang rejected the weights: {answer['message']}. They may be partly overwritten; only a complete update makes the "
            "engine usable again"
        )


def check_coverage(missed: str, allow_mismatch: bool) -> None:
    """Check that the first update wrote all parameters.

    Args:
        missed: SGLang's description of the parameters that the update did not write; empty if there are none.
        allow_mismatch: warn instead of raising.

    Raises:
        MismatchError: SGLang would compute with parameters that still have their random initial values.
    """
    if not missed:
        return
    message = (
        f"the weight update did not reach {missed}, which keeps its initial values, so SGLang computes another function than the "
        "trainer. The checkpoint has no tensor that SGLang loads there"
    )
    if not allow_mismatch:
        raise MismatchError(f"{message}; use another engine, or train anyway with --allow-mismatch")
    log.warning("%s (--allow-mismatch was given)", message)
