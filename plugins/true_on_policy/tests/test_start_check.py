"""The start of a run, at which engine and trainer have to compute the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.plugin import MismatchError
from miles_embedded.engine.engine import EmbeddedEngine

OPTIONS = {"self_check": True, "steps": 0, "device": "cpu"}


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that reports log-probabilities with an error far below rounding in BF16."""
    generate = EmbeddedEngine.generate

    async def changed(engine: Any, request: Any) -> Any:
        response = await generate(engine, request)
        response.log_probs = [x * (1 + 1e-6) for x in response.log_probs]
        return response

    monkeypatch.setattr(EmbeddedEngine, "generate", changed)


def test_equal_bits_are_logged(toy_run: Any, caplog: Any) -> None:
    toy_run(["true_on_policy"], log_level="info", **OPTIONS)
    assert "engine and trainer compute the same bits: the gap is 0.0 for 192 tokens" in caplog.text


def test_with_r3_the_trainer_scores_what_has_no_routes(toy_run: Any, caplog: Any) -> None:
    toy_run(["true_on_policy", "r3"], log_level="info", **OPTIONS)
    assert "engine and trainer compute the same bits" in caplog.text


def test_a_difference_stops_the_run_or_is_a_warning(toy_run: Any, rounded: None, caplog: Any) -> None:
    with pytest.raises(
        MismatchError, match=r"the log-probabilities of \d+ of 192 generated tokens differ between engine embedded"
    ):
        toy_run(["true_on_policy"], **OPTIONS)
    toy_run(["true_on_policy"], allow_mismatch=True, **OPTIONS)
    assert "(--allow-mismatch was given)" in caplog.text


def test_without_the_plugin_nothing_is_compared(toy_run: Any, rounded: None) -> None:
    toy_run(**OPTIONS)
