"""Buckets in GPU memory, read by another process through the driver's handles; and one storage on a GPU."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from miles_core.data import Encoded
from miles_core.plugin import SyncError
from miles_core.trainer import World
from miles_embedded.testing import ProcessEngine
from miles_testing.stored import stored_units
from miles_workers.transport import DeviceMemory, Inbox, Loan, device_memory
from miles_workers.transport.device_memory import attach
from miles_zero_copy import sender
from miles_zero_copy.transport import BucketTransport

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_gpu_that_the_engine_does_not_see_is_said():
    where = {"kind": "device", "key": "k", "gpu": "GPU-of-another-host", "host": "other", "handle": "", "nbytes": 1024}
    with pytest.raises(SyncError, match=r"GPU-of-another-host( of another host|, but the engine's process has no GPU)"):
        attach(where)
    with pytest.raises(SyncError, match="GPU-of-another-host"):
        list(Inbox().open({"memory": where}))


class Driver:
    """Maps a handle to memory of this process, or refuses."""

    def __init__(self, memory, refuses=False):
        self.memory, self.refuses, self.closed = memory, refuses, 0

    def cuIpcOpenMemHandle_v2(self, pointer, handle, flags):
        pointer._obj.value = self.memory.data_ptr()
        return 201 if self.refuses else 0

    def cuIpcCloseMemHandle(self, pointer):
        self.closed += 1

    def cuGetErrorName(self, status, name):
        name._obj.value = b"CUDA_ERROR_INVALID_CONTEXT"


@pytest.fixture
def blind(monkeypatch):
    """One GPU that this process sees, and another that it does not, of a double of the driver in host memory."""
    driver = Driver(torch.arange(1024).to(torch.uint8))
    wrap = device_memory.tensor_at
    monkeypatch.setattr(device_memory, "_driver", lambda: driver)
    monkeypatch.setattr(device_memory, "_uuid", lambda index: "GPU-of-this-process")
    monkeypatch.setattr(device_memory, "tensor_at", lambda p, n, device, owner: wrap(p, n, torch.device("cpu"), owner))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    where = {"kind": "device", "key": "k", "gpu": "GPU-hidden", "host": device_memory._host(), "process": "other"}
    return driver, where | {"handle": "00" * 64, "base": 0, "nbytes": 1024}


def test_memory_of_a_gpu_that_is_hidden_from_the_engine_is_mapped(blind):
    driver, where = blind
    tensor = attach(where)
    view = tensor[100:]
    assert torch.equal(tensor, driver.memory) and tensor.data_ptr() == driver.memory.data_ptr()
    del tensor
    assert not driver.closed and view[0] == 100
    del view
    assert driver.closed == 1


def test_memory_of_another_host_is_not_mapped(blind):
    driver, where = blind
    with pytest.raises(SyncError, match="GPU-hidden of another host, whose memory this host cannot map"):
        attach(where | {"host": "other"})
    assert torch.equal(attach(where), driver.memory)


def test_a_driver_that_does_not_map_a_hidden_gpu_is_said(blind):
    driver, where = blind
    driver.refuses = True
    with pytest.raises(
        SyncError, match=r"does not show the GPU GPU-hidden \(cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_CONTEXT"
    ):
        attach(where)


def there_and_here(units, engine, checkpoints, versions=1):
    """Send to an engine in another process: what it scores, what this one does, and the last report."""
    there = ProcessEngine(checkpoints[0], seed=7, max_context=48, max_running_requests=4)
    transport = BucketTransport(there, World(), 40 << 10)
    with asyncio.Runner() as runner:
        runner.run(there.start())
        try:
            for version in range(1, versions + 1):
                report = runner.run(transport.send(iter(units), version))
            scored = runner.run(there.score([[3, 4, 5, 6]]))[0]
        finally:
            runner.run(there.stop())
            transport.close()
        runner.run(engine.update_weights(stored_units(checkpoints[1]), 1))
        here = runner.run(engine.score([[3, 4, 5, 6]]))[0]
    assert there.version == versions and report.nbytes >= sum(u.nbytes for u in units)
    return scored.tolist(), here.tolist()


def on_gpu(checkpoint, lasting=False):
    return [
        Encoded(u.name, {n: t.cuda() for n, t in u.parts.items()}, lasting=lasting) for u in stored_units(checkpoint)
    ]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lasting", [False, True], ids=["packed", "lent"])
def test_another_process_reads_gpu_memory(checkpoints, engine, caplog, monkeypatch, lasting):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sender, "LENT", 1024)
    monkeypatch.setattr(sender, "LOANS", 5)
    units, lent, message = on_gpu(checkpoints[1], lasting), [], Loan.message
    monkeypatch.setattr(Loan, "message", lambda self: lent.append(len(self)) or message(self))
    scored, here = there_and_here(units, engine, checkpoints, versions=2)
    assert scored == here and "weights travel through GPU memory by handle" in caplog.text
    assert sum(lent) > len(units) if lasting else not lent
    assert all(count <= 5 for count in lent) and lent[: len(lent) // 2] == lent[len(lent) // 2 :]  # two versions


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_gpu_that_does_not_see_the_other_gets_a_broadcast(checkpoints, engine, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    units = on_gpu(checkpoints[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of the processes that are started now
    scored, here = there_and_here(units, engine, checkpoints, versions=2)
    assert scored == here and "weights travel through a broadcast (NCCL), because the weights are on GPU" in caplog.text


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lasting", [False, True], ids=["packed", "lent"])
def test_an_engine_in_the_trainer_s_process_reads_gpu_memory_where_it_is(checkpoints, engine, monkeypatch, lasting):
    monkeypatch.setattr(sender, "LENT", 1024)
    transport = BucketTransport(engine, World(), 40 << 10)
    for version in (1, 2):
        asyncio.run(transport.send(iter(on_gpu(checkpoints[1], lasting)), version))
    transport.close()
    received = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    assert set(engine.received) <= {"device", "loan"} and ("loan" in engine.received) == lasting
    asyncio.run(engine.update_weights(stored_units(checkpoints[1]), 3))
    assert all(torch.equal(received[name], tensor) for name, tensor in engine.model.state_dict().items())


@pytest.mark.gpu
@needs_gpu
def test_memory_is_zero_and_cannot_be_larger_than_the_gpu():
    memory = DeviceMemory(4096, torch.device("cuda"))
    assert int(memory.buffer.sum()) == 0 and memory.buffer.device.type == "cuda"
    memory.close()
    with pytest.raises(SyncError, match="bytes of GPU memory"):
        DeviceMemory(1 << 50, torch.device("cuda"))


@pytest.mark.gpu
@needs_gpu
def test_one_storage_on_a_gpu_changes_nothing(toy_run):
    options = {"rollout_precision": "fp8", "train_precision": "fp8", "emulate_precision": True}
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32}
    runs = [toy_run(["fp8", *more], sizes=sizes, **options) for more in ((), ("zero_copy",))]
    # in the second step kernels that add in any order already make a difference
    first, second = (r.metrics[0] for r in runs)
    for name in ("reward/mean", "train/loss", "mismatch/abs_log_prob"):
        assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-6), name
    trained, served = (dict(m.named_parameters()) for m in (runs[1].trainer.model, runs[1].engine.model))
    shared = [n for n, p in trained.items() if n in served and served[n].data_ptr() == p.data_ptr()]
    assert trained["model.embed_tokens.weight"].device.type == "cuda" and "model.embed_tokens.weight" in shared
