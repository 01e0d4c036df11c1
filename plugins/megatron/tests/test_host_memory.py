"""Host memory of a machine, compared with published runs."""

import shutil
from pathlib import Path

import pytest

from miles_core.checkpoint.hf_files import read_json
from miles_core.plugin import Fact, Facts
from miles_megatron import families
from miles_megatron.host_memory import describe_host, host_memory
from miles_megatron.memory import Work
from miles_megatron.sizes import Sizes

ROOT = Path(__file__).parents[3]


@pytest.fixture
def architecture(tmp_path):
    shutil.copy(ROOT / "tests/published/deepseek-v3.json", tmp_path / "config.json")
    return families.read(read_json(tmp_path / "config.json"))


def facts(**values):
    return Facts(
        [
            Fact(name.replace("__", "."), value, "here", chosen=True)
            for name, value in {"gpu.count": 8, **values}.items()
        ]
    )


#: verl's layout of DeepSeek-V3 on 96 GPUs, with all of the optimizer in host memory.
VERL = Sizes(ranks=96, tp=8, pp=12, ep=8, etp=1, first=0, last=6, sequence=True)
WORK = Work(tokens=8192, micro_batches=4, offloaded=1.0, recompute="full")


def test_an_offloaded_optimizer_is_as_large_as_published(architecture):
    """verl publishes 1,500 GB per machine (its guide to DeepSeek 671B)."""
    found = host_memory(facts(colocate=True), architecture, VERL, WORK)
    assert found.total / 1e9 == pytest.approx(1500, rel=0.2)
    assert found.optimizer > 12 * 671e9 / 12, (
        "more than the state itself: gradients, and pinned copies that are rounded up"
    )


def test_each_part_is_there_only_with_its_option(architecture):
    alone = host_memory(facts(), architecture, VERL, Work(tokens=8192, micro_batches=4))
    assert (
        alone.total == alone.processes > 0
        and describe_host(facts(), architecture, VERL, Work(tokens=8192, micro_batches=4)) == ""
    )
    asked = facts(colocate=True, algorithm__kl_loss_coef=0.1, async_save=True)
    every = host_memory(asked, architecture, VERL, WORK)
    assert min(every.optimizer, every.sleeping, every.reference, every.checkpoint) > 1e11
    text = describe_host(asked, architecture, VERL, WORK)
    assert "for the 8 ranks of a machine: " in text and all(
        name in text for name in ("optimizer", "sleeping", "reference", "checkpoint")
    )
    half = host_memory(facts(), architecture, VERL, Work(tokens=8192, micro_batches=4, offloaded=0.5))
    assert half.optimizer == pytest.approx(every.optimizer / 2)
