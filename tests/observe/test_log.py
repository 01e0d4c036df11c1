"""Records that are logged before the log of a run exists."""

from __future__ import annotations

import logging

import pytest

from miles_core.observe.log import hold_records, release_records


def test_what_the_checks_of_a_run_log_is_in_its_log(toy_run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "a", "label": "b"}\n' * 3 + '{"input": "a a a a a a a a", "label": "b"}\n')
    done = toy_run(steps=1, prompt_data=prompts, rollout_max_prompt_len=4)
    said = "--prompt-data: dropped 1 prompts that are longer than --rollout-max-prompt-len"
    assert (done.directory / "run.log").read_text().count(said) == 1


def test_held_records_are_released_once_and_warnings_also_after_an_error(caplog):
    caplog.set_level(logging.INFO, "miles_core")
    log = logging.getLogger("miles_core.launch")
    with hold_records() as records:
        log.info("dropped")
        assert not caplog.records
    release_records(records)
    assert [record.getMessage() for record in caplog.records] == ["dropped"]
    caplog.clear()
    with pytest.raises(ValueError, match="refused"), hold_records():
        log.info("dropped")
        log.warning("not locked")
        raise ValueError("refused")
    assert [record.getMessage() for record in caplog.records] == ["not locked"]
