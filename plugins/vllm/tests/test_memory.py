"""Memory of a vLLM engine in the plan, by hand, and what is refused."""

import re
import shutil
from pathlib import Path

import pytest

from miles_core.plugin import PlanError
from miles_testing import plan

PUBLISHED = Path(__file__).parents[3] / "tests" / "published"
RUN = {"runtime": "ray", "engine": "vllm", "trainer": "megatron", "actor_num_gpus_per_node": 8, "expert_model_parallel_size": 8,
       "recompute_granularity": "full", "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True,
       "rollout_max_prompt_len": 1024, "rollout_max_response_len": 8192}  # fmt: skip


@pytest.fixture
def planned(tmp_path):
    def run(name, hardware, **options):
        shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
        return plan(hf_checkpoint=str(tmp_path), facts=[f"hardware={hardware}"], **RUN, **options)

    return run


def table(accepted):
    return next(text for text in accepted.reviews if text.startswith("memory of a GPU"))


def test_an_engine_is_in_the_table_with_its_weights_and_cache(planned):
    text = table(planned("qwen3-30b-a3b", "16xH100", rollout_num_gpus_per_engine=4))
    engine = next(line for line in text.splitlines() if line.strip().startswith("engine, GPU"))
    numbers = [float(number) for number in re.findall(r"\d+\.\d", engine)]
    assert numbers[0] == pytest.approx(30.53 * 2 / 4, abs=0.1)
    assert 0.92 * 86 - 30.53 * 2 / 4 - 8 in [pytest.approx(number, abs=0.3) for number in numbers]
    assert "vLLM's default" in text and "9,216 tokens" in text


def test_an_engine_takes_turns_with_the_trainer(planned):
    text = table(planned("qwen3-30b-a3b", "8xH100", rollout_num_gpus_per_engine=4, colocate=True))
    assert "0.80 of each" in text and "they take turns on the same GPUs" in text


def test_a_model_that_does_not_fit_is_refused_with_engines_that_do(planned):
    with pytest.raises(PlanError) as refused:
        planned("qwen3-30b-a3b", "16xH100", rollout_num_gpus_per_engine=1, vllm_gpu_memory_utilization=0.5)
    text = str(refused.value)
    assert "vllm needs an engine that fits the model" in text and "--vllm-gpu-memory-utilization 0.5" in text
    assert "--rollout-num-gpus-per-engine 2\n" in text
    planned("qwen3-30b-a3b", "16xH100", rollout_num_gpus_per_engine=2, vllm_gpu_memory_utilization=0.5)


def test_sizes_that_do_not_divide_and_ranks_without_gpus_are_refused(planned):
    with pytest.raises(PlanError, match="32 attention heads by 3; 4 heads of keys and values by 3"):
        planned("qwen3-30b-a3b", "16xH100", rollout_num_gpus=3, rollout_num_gpus_per_engine=3)
    with pytest.raises(
        PlanError, match=r"--vllm-tensor-parallel-size 2, the GPUs of an engine(.|\n)*--rollout-num-gpus-per-engine 4$"
    ):
        planned("qwen3-30b-a3b", "16xH100", rollout_num_gpus_per_engine=2, vllm_tensor_parallel_size=4)
