import time

import pytest

from miles_core.observe import timer
from miles_core.observe.timer import Clock


def ticking(monkeypatch, times):
    source = iter(times)
    monkeypatch.setattr(timer.time, "perf_counter", lambda: next(source))


def test_nested_phases_count_for_themselves(monkeypatch):
    #                     start, rollout in, sync in, sync out, rollout out, metrics
    ticking(monkeypatch, [0.0, 1.0, 3.0, 7.0, 8.0, 10.0])
    clock = Clock()
    with clock.phase("rollout"), clock.phase("sync"):
        pass
    assert clock.metrics() == {"time/rollout": 3.0, "time/sync": 4.0, "time/step": 10.0}


def test_metrics_start_anew_and_a_failing_phase_still_counts():
    clock = Clock()
    with pytest.raises(ZeroDivisionError), clock.phase("train"):
        time.sleep(0.002)
        raise ZeroDivisionError
    clock.add("rollout", 3.0)
    first = clock.metrics()
    assert first["time/train"] >= 0.002
    assert first["time/rollout"] == 3.0
    assert clock.metrics().keys() == {"time/step"}


def test_device_is_synchronised_around_phases():
    calls = []
    clock = Clock(synchronize=lambda: calls.append(1))
    with clock.phase("train"):
        assert len(calls) == 1
    assert len(calls) == 2


def test_observers_receive_phases_and_other_intervals():
    clock, seen = Clock(), []
    clock.record("early", 0.0)
    clock.observe(lambda name, start, end: seen.append((name, end - start)))
    with clock.phase("outer"), clock.phase("inner"):
        pass
    clock.record("request", 1.0, 3.0)
    assert [name for name, _ in seen] == ["inner", "outer", "request"] and seen[2][1] == 2.0
    assert all(seconds >= 0 for _, seconds in seen) and "time/request" not in clock.metrics()
