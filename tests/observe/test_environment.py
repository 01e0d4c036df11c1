import json
import sys
from types import SimpleNamespace

import pytest

from miles_core.observe.environment import bytes_text, detect_gpus, environment, find_version, write_environment


class NVMLError(Exception):
    pass


def nvml(monkeypatch, **changes):
    fake = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"570.1",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetCudaComputeCapability": lambda h: (9, 0),
        "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(total=141 << 30, free=140 << 30),
        "nvmlDeviceGetName": lambda h: "NVIDIA H200",
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**(fake | changes)))


def refuse(*_):
    raise NVMLError("Driver Not Loaded")


def test_gpus_come_from_nvml(monkeypatch):
    nvml(monkeypatch)
    (gpu,), why = detect_gpus()
    assert (gpu.name, gpu.sm, gpu.memory, gpu.driver, why) == ("NVIDIA H200", 90, 141 << 30, "570.1", "")


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_no_gpu_comes_with_the_reason(monkeypatch, failing):
    nvml(monkeypatch, **{failing: refuse})
    assert detect_gpus() == ((), "NVML: Driver Not Loaded")


def test_no_device_and_no_package(monkeypatch):
    nvml(monkeypatch, nvmlDeviceGetCount=lambda: 0)
    assert detect_gpus() == ((), "NVML finds no device")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect_gpus() == ((), "the package nvidia-ml-py is not installed")


def test_environment_is_plain_data(tmp_path):
    write_environment(tmp_path)
    written = json.loads((tmp_path / "environment.json").read_text())
    here = environment()
    assert written["cpus"] == here.cpus >= 1
    assert written["packages"]["torch"] == find_version("torch")
    assert written["command"] == sys.argv


def test_bytes():
    assert [bytes_text(n) for n in (512, 1536, 3 << 30, 5 << 40)] == ["512 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
