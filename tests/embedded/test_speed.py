import pytest
import torch

from miles_embedded.speed import measure_speeds


def numbers(found):
    return {name: float(text.split()[0].replace(",", "")) for name, text in found.items()}


def test_speeds_of_this_machine():
    found = numbers(measure_speeds())
    assert {"CPU, copy", "CPU, float32 product", "CPU, bfloat16 product"} <= set(found)
    assert all(value > 0 for value in found.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_speeds_of_a_gpu():
    found = numbers(measure_speeds())
    assert found["GPU 0, copy"] > 100
    assert 0.1 < found["GPU 0, launch of a kernel"] < 100


def test_a_device_without_free_memory_is_named(monkeypatch):
    def refuse(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("miles_embedded.speed._copy_speed", refuse)
    assert measure_speeds()["CPU"] == "not measured: its memory is in use"
