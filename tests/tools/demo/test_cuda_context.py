import ctypes

import pytest

from miles_tools.demo.cuda_context import open_context


class Driver:
    """Records the calls of a CUDA driver; ``result`` is what initialisation returns."""

    def __init__(self, result=0):
        self.result, self.calls = result, []

    def cuInit(self, flags):
        self.calls.append("cuInit")
        return self.result

    def cuDeviceGet(self, device, ordinal):
        self.calls.append(f"cuDeviceGet {ordinal}")
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.calls.append("cuDevicePrimaryCtxRetain")
        return 0


@pytest.fixture
def loaded(monkeypatch):
    """Make ``ctypes`` load a driver, and return it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return driver


def test_the_context_of_the_first_gpu_is_retained(loaded):
    thread = open_context()
    assert thread is not None
    thread.join()
    assert loaded.calls == ["cuInit", "cuDeviceGet 0", "cuDevicePrimaryCtxRetain"]


def test_a_driver_that_refuses_is_left_alone(loaded):
    loaded.result = 100
    thread = open_context()
    assert thread is not None
    thread.join()
    assert loaded.calls == ["cuInit"]


def test_no_context_without_visible_gpus_or_without_a_driver(loaded, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert open_context() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert open_context() is None
    assert loaded.calls == []
