"""When a crowded machine is reported."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from miles_embedded.trainer.threads import warn_if_crowded


@pytest.mark.parametrize(
    ("load", "cores", "threads", "told"),
    [(0.9, 2, 2, False), (3.2, 2, 2, True), (3.2, 2, 1, False), (3.2, 16, 8, False), (12, 16, 8, True)],
)
def test_it_is_told_when_threads_have_no_cores(load, cores, threads, told, monkeypatch, caplog):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with caplog.at_level(logging.INFO):
        warn_if_crowded()
    assert ("OMP_NUM_THREADS=1" in caplog.text) == told
