from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from miles_testing import toy_run
from miles_tools.profiler import ProfiledStep, summarize, unite


def event(name, start, end, device=DeviceType.CUDA, annotation=False):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name,
        time_range=span,
        device_type=device,
        is_user_annotation=annotation,
        self_cpu_time_total=end - start,
    )


def test_union_of_intervals():
    assert unite([]) == 0
    assert unite([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_kernels_launches_and_idle_time_of_a_gpu():
    events = [
        event("matmul", 0, 400),
        event("norm", 300, 500),
        event("matmul", 700, 900),
        event("step", 0, 1000, annotation=True),
        event("cudaGraphLaunch", 0, 5, DeviceType.CPU),
        event("cudaLaunchKernel", 5, 9, DeviceType.CPU),
        event("aten::mm", 0, 9, DeviceType.CPU),
    ]
    summary = summarize(events, 1e-3)
    assert [(row.name, row.calls, round(row.seconds * 1e6)) for row in summary.rows] == [
        ("matmul", 2, 600),
        ("norm", 1, 200),
    ]
    assert summary.busy == pytest.approx(700e-6)
    assert summary.launches == 2
    assert "GPU busy 0.7 ms of 1.0 ms, idle 30.0%; 3 kernels in 2 launches" in str(summary)


def test_only_the_first_rows_are_printed():
    summary = summarize([event(f"kernel {i}", i, i + 1) for i in range(20)], 1e-3)
    assert "8 others" in str(summary)
    assert len(str(summary).splitlines()) == 15


def test_operators_without_a_gpu(tmp_path, caplog):
    sink = ProfiledStep(tmp_path / "profile")
    with caplog.at_level("INFO"):
        sink.write(0, {"eval/accuracy": 0.0})
        for step in (4, 5, 6):  # the first steps after a resume
            sink.write(step, {"time/step": 1.0})
            torch.ones(4, 4) @ torch.ones(4, 4)
        sink.close()
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == [
        "step_00000005.trace.json",
        "step_00000005.txt",
    ]
    assert "aten::mm" in (tmp_path / "profile" / "step_00000005.txt").read_text()
    assert "aten::mm" in caplog.text


def test_a_run_of_one_step_warns_that_nothing_was_profiled(tmp_path, caplog):
    sink = ProfiledStep(tmp_path)
    sink.write(1, {"time/step": 1.0})
    sink.close()
    assert "--profile recorded nothing" in caplog.text
    assert not list(tmp_path.iterdir())


def test_profile_of_a_run():
    run = toy_run(profile=True, steps=3)
    assert {file.name for file in (run.directory / "profile").iterdir()} == {
        "step_00000002.trace.json",
        "step_00000002.txt",
    }
