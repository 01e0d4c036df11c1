"""Too little free memory on a GPU is one sentence before anything is built."""

import pytest
import torch

from miles_core.errors import ConfigError
from miles_core.plugin import Parts, Usage
from miles_embedded.model import free_memory
from miles_testing import plan

GB = 10**9


class Run:
    def __init__(self, **facts):
        self.plan = type("Plan", (), {"fact": lambda self, name: facts.get(name)})()


def check(monkeypatch, available, kind="engine", device="cuda", reserved=0, usages=(), **facts):
    usages = usages or [
        Usage("trainer", "rank", Parts(weights=20 * GB)),
        Usage("engine", "GPU", Parts(weights=10 * GB)),
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (available * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved * GB)
    monkeypatch.setattr(free_memory, "usages_of", lambda run, config: usages)
    config = type("Config", (), {"model": type("Model", (), {"device": device})})
    free_memory.check_free_memory(Run(**facts), config, kind)


def test_both_sides_of_one_process_are_counted(monkeypatch):
    check(monkeypatch, 31, runtime="inline")
    with pytest.raises(ConfigError) as error:
        check(monkeypatch, 29, runtime="inline")
    text = str(error.value)
    assert (
        "29.0 of 80.0 GB free" in text and "asks for 30.0 GB (20.0 GB for the trainer, 10.0 GB for the engine" in text
    )
    assert all(flag in text for flag in ("--max-running-requests", "--recompute-activations")) and "\n" not in text


def test_activations_and_cache_that_may_not_fit_are_a_warning(monkeypatch, caplog):
    usages = [
        Usage("trainer", "rank", Parts(weights=20 * GB, activations=30 * GB)),
        Usage("engine", "GPU", Parts(cache=10 * GB)),
    ]
    check(monkeypatch, 61, runtime="inline", usages=usages)
    assert not caplog.records
    check(monkeypatch, 59, runtime="inline", usages=usages)
    assert "asks for 60.0 GB (50.0 GB for the trainer, 10.0 GB for the engine" in caplog.text
    with pytest.raises(ConfigError, match=r"asks for 60\.0 GB"):
        check(monkeypatch, 19, runtime="inline", usages=usages)


def test_what_this_process_holds_is_its_own(monkeypatch):
    check(monkeypatch, 9, runtime="inline", reserved=21)


@pytest.mark.parametrize("facts", [{"runtime": "inline", "colocate": True}, {"runtime": "elsewhere"}])
def test_sides_that_take_turns_or_are_apart_are_counted_alone(monkeypatch, facts):
    check(monkeypatch, 11, **facts)
    with pytest.raises(ConfigError, match=r"asks for 10\.0 GB"):
        check(monkeypatch, 9, **facts)
    with pytest.raises(ConfigError, match=r"asks for 20\.0 GB"):
        check(monkeypatch, 11, "trainer", **facts)


def test_an_empty_gpu_is_left_to_the_plan_and_a_cpu_has_none(monkeypatch):
    check(monkeypatch, 78, runtime="inline")
    check(monkeypatch, 1, device="cpu")


def test_the_estimate_is_that_of_the_plan():
    """With ``lora``, whose trainer replaces that of the embedded backend."""
    sizes = {}
    for plugins in ([], ["lora"]):
        accepted = plan(plugins, device="cuda", facts=["hardware=H200"])
        config = type(
            "Config", (), {"model": type("Model", (), {"hf_checkpoint": accepted.fact("model.hf_checkpoint")})}
        )
        run = type("Run", (), {"plan": accepted})
        sizes[len(plugins)] = {u.kind: u.parts for u in free_memory.usages_of(run, config)}
        assert sizes[len(plugins)].keys() == {"trainer", "engine"}
    assert sizes[1]["trainer"].gradients < sizes[0]["trainer"].gradients


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_others_fill_is_refused_before_the_first_step(toy_run, monkeypatch):
    whole = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, whole))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    with pytest.raises(ConfigError, match=r"other programs use the rest, and this run asks for \d+\.\d GB"):
        toy_run(device="cuda")
