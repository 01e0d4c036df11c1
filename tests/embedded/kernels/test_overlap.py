"""Kernels that start while the previous one still runs: none accesses memory before it has waited, in the code compiled for sm_90."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("overlapping_kernels.py")
#: Kinds of PTX instructions; the first pattern that matches counts. Other kernels share only global memory.
INSTRUCTIONS = {
    "wait": r"griddepcontrol\.wait\b",
    "release": r"griddepcontrol\.launch_dependents\b",
    "private": r"(ld|st)\.(param|shared|local)",
    "access": r"(ld|ldu|st|atom|red|cp|prefetch|prefetchu|multimem)\.",
    "branch": r"(bra|brx|ret|exit|call)\b",
}
KIND = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in INSTRUCTIONS.items()))


def list_kernels():
    """Return the names of all Triton kernels with a parameter ``OVERLAP``, without ``wait`` and ``release``, which they call."""
    found = set()
    for root in (ROOT / "miles_embedded", *ROOT.glob("plugins/*/miles_*")):
        for file in root.rglob("*.py"):
            source = file.read_text(encoding="utf-8")
            if "OVERLAP" not in source:
                continue
            module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
            for node in ast.parse(source).body:
                if isinstance(node, ast.FunctionDef) and "OVERLAP" in [a.arg for a in node.args.args]:
                    found.add(f"{module}.{node.name}")
    return found - {"miles_embedded.kernels.overlap.wait", "miles_embedded.kernels.overlap.release"}


def list_steps(ptx):
    """Return the kinds of a kernel's instructions in the order of the text. Jump labels count as branches."""
    steps = []
    body = re.sub(r"//.*", "", ptx.split(".entry", 1)[1])
    for line in re.split(r"[;\n]", body):
        instruction = re.sub(r"^[\s{]*(@!?%\w+\s+)?", "", line)
        found = KIND.match(instruction)
        if found and found.lastgroup != "private":
            steps.append(found.lastgroup)
        elif re.match(r"\$L__BB\w+:", instruction):
            steps.append("branch")
    return steps


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Kernel -> the steps of each case, with overlap and without."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("ptx")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    ran = subprocess.run([sys.executable, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    steps: dict[str, dict[str, list]] = {"on": {}, "off": {}}
    for file in folder.glob("*.ptx"):
        _, kernel, word = file.stem.split("-")
        steps[word].setdefault(kernel, []).append(list_steps(file.read_text(encoding="utf-8")))
    return steps


def test_every_kernel_is_compiled(compiled):
    assert compiled["on"].keys() == list_kernels(), f"the cases of {SCRIPT.name} are not the kernels that take OVERLAP"


def test_a_kernel_waits_once_before_its_first_access(compiled):
    for kernel, cases in compiled["on"].items():
        for steps in cases:
            assert "access" in steps, kernel
            before = steps[: steps.index("wait")] if "wait" in steps else steps
            assert set(before) <= {"release"}, f"{kernel} accesses memory or branches before it waits: {before}"
            assert steps.count("wait") == 1 and "release" in steps, kernel


def test_without_overlap_a_kernel_neither_waits_nor_releases(compiled):
    for kernel, cases in compiled["off"].items():
        for steps in cases:
            assert "access" in steps and not {"wait", "release"} & set(steps), kernel


def test_a_tensor_on_a_cpu_has_no_overlap(triton):
    from miles_embedded.kernels.overlap import overlap

    assert overlap(torch.zeros(2)) == {"OVERLAP": False}


@pytest.mark.parametrize(
    ("capability", "driver", "can"),
    [((9, 0), 12030, True), ((12, 0), 13000, True), ((8, 9), 13000, False), ((9, 0), 12020, False)],
)
def test_which_gpus_and_drivers_overlap(triton, monkeypatch, capability, driver, can):
    from miles_embedded.kernels import overlap

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(overlap, "_DRIVER", driver)
    assert overlap._can_overlap.__wrapped__(torch.device("cuda")) is can


def test_torch_compile_can_trace_whether_a_gpu_overlaps(triton, monkeypatch):
    from miles_embedded.kernels import overlap

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(overlap, "_DRIVER", 13000)

    @torch.compile(fullgraph=True, backend="eager")
    def count(x):
        return x + 1 if overlap._can_overlap.__wrapped__(torch.device("cuda")) else x

    assert count(torch.zeros(())) == 1
