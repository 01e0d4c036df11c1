import json
import sys

import pynvml
import pytest

from miles_core.errors import CheckpointError, ConfigError
from miles_core.plugin import detect
from miles_core.plugin.facts import Fact, Facts, State


def values(facts):
    return {f.name.partition(".")[2] or f.name: f.value for f in facts if f.state is State.KNOWN}


@pytest.fixture
def nvml(monkeypatch):
    """A host with these GPUs: (name, (major, minor), bytes)."""

    def host(gpus, error=None):
        def start():
            if error is not None:
                raise error

        fakes = {
            "nvmlInit": start,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetName": lambda i: gpus[i][0],
            "nvmlDeviceGetCudaComputeCapability": lambda i: gpus[i][1],
            "nvmlDeviceGetMemoryInfo": lambda i: type("Memory", (), {"total": gpus[i][2]}),
            "nvmlDeviceGetUUID": lambda i: f"GPU-{i}abc",
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(pynvml, name, fake)
        monkeypatch.setattr(detect, "_has_nvml", lambda: True)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return host


H200 = ("NVIDIA H200", (9, 0), 150_754_820_096)
A100 = ("NVIDIA A100-SXM4-80GB", (8, 0), 85_899_345_920)


def test_gpus_are_read_through_nvml(nvml):
    nvml([H200, H200])
    found = detect.gpu_facts()
    assert values(found) == {"gpu": "H200", "sm": 90, "count": 2, "memory_gb": 151}
    assert {f.origin for f in found} == {"detected: NVIDIA H200"}


def test_of_different_gpus_the_weakest_counts(nvml):
    nvml([H200, A100])
    found = detect.gpu_facts()
    assert values(found) == {"gpu": "A100", "sm": 80, "count": 2, "memory_gb": 86}
    assert "the weakest of" in found[0].origin


@pytest.mark.parametrize(("visible", "count"), [("1", 1), ("0,1", 2), ("GPU-1", 1), ("0,7,1", 1), ("", 0), ("-1", 0)])
def test_only_visible_gpus_count(nvml, monkeypatch, visible, count):
    nvml([H200, H200])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert values(detect.gpu_facts())["count"] == count


def test_a_laptop_is_known_to_have_no_gpu(nvml, monkeypatch):
    nvml([], pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    monkeypatch.setattr(detect.Path, "exists", lambda path: False)
    assert values(detect.gpu_facts()) == {"gpu": "none", "sm": 0, "count": 0, "memory_gb": 0}


def test_without_the_drivers_library_pynvml_is_not_imported(monkeypatch):
    monkeypatch.setattr(detect.sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    monkeypatch.setattr(detect.Path, "exists", lambda path: False)
    assert values(detect.gpu_facts())["gpu"] == "none"


def test_an_amd_host_has_no_compute_capability(nvml, monkeypatch):
    nvml([], pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    monkeypatch.setattr(detect.Path, "exists", lambda path: str(path) == "/dev/kfd")
    assert values(detect.gpu_facts()) == {"gpu": "AMD", "sm": 0}


def test_a_driver_that_does_not_answer_leaves_everything_unknown(nvml):
    nvml([], pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN))
    assert {f.state for f in detect.gpu_facts()} == {State.UNKNOWN}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce GTX 1080", "GTX-1080"),
    ],
)
def test_names_are_shortened(name, short):
    assert detect.short_name(name) == short


def checkpoint(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


MODELS = {
    "qwen3_moe": (
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0, 1],
        },
        {"moe": True, "num_experts": 128, "top_k": 8, "layers": 48, "moe_layers": 46, "mtp_layers": 0},
    ),
    "deepseek_v3": (
        {
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
        },
        {"moe": True, "num_experts": 256, "top_k": 8, "layers": 61, "moe_layers": 58, "mtp_layers": 1},
    ),
    "llama": ({"num_hidden_layers": 32}, {"moe": False, "num_experts": 0, "layers": 32, "moe_layers": 0}),
    "llama4": (
        {
            "text_config": {
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "num_hidden_layers": 4,
                "moe_layers": [1, 3],
            }
        },
        {"moe": True, "num_experts": 16, "top_k": 1, "layers": 4, "moe_layers": 2},
    ),
    "lfm2_moe": (
        {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_dense_layers": 1},
        {"moe": True, "layers": 4, "moe_layers": 3},
    ),
    "jamba": (
        {"num_experts": 8, "num_hidden_layers": 8, "expert_layer_period": 2, "expert_layer_offset": 1},
        {"moe": True, "layers": 8, "moe_layers": 4},
    ),
    "nemotron_h": (
        {"n_routed_experts": 8, "hybrid_override_pattern": "ME*EM-"},
        {"moe": True, "layers": 6, "moe_layers": 2},
    ),
    "nemotron_h without experts": (
        {"n_routed_experts": 8, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
        {"moe": False, "layers": 4, "moe_layers": 0},
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_is_read_from_its_config(tmp_path, family):
    config, expected = MODELS[family]
    found = values(detect.model_facts(checkpoint(tmp_path, model_type=family, vocab_size=10, **config)))
    assert expected.items() <= found.items()
    assert found["type"] == family and found["quantized"] == "none"


def test_facts_of_a_model_say_where_they_come_from(tmp_path):
    facts = Facts(detect.model_facts(checkpoint(tmp_path, model_type="x", num_experts=8, num_hidden_layers=2)))
    assert str(facts["model.moe"]) == "model.moe = true (config.json: num_experts=8)"
    quantised = checkpoint(tmp_path, model_type="x", quantization_config={"quant_method": "fp8"})
    assert Facts(detect.model_facts(quantised)).value("model.quantized") == "fp8"


def test_without_a_checkpoint_the_model_is_unknown():
    assert {f.state for f in detect.model_facts(None)} == {State.UNKNOWN}


def test_a_hub_name_is_looked_up_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert {f.state for f in detect.model_facts("org/name")} == {State.UNKNOWN}
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    checkpoint(repository / "snapshots" / "abc", model_type="qwen3")
    assert values(detect.model_facts("org/name"))["type"] == "qwen3"


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "holds no config.json"), ("{", "cannot be read"), ("[]", "not an object")]
)
def test_a_checkpoint_without_a_readable_config_is_refused(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=reason):
        detect.model_facts(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and must be a whole number of at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_experts": "many"}, "cannot be used"),
        ({"quantization_config": [1]}, "cannot be used"),
        ({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": 2.5}, "max_position_embeddings is 2.5"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(tmp_path, content, reason):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=reason):
        detect.model_facts(str(tmp_path))


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        detect.model_facts(str(tmp_path / "gone"))


HOST = Facts(
    [
        *(
            Fact(n, v, "detected")
            for n, v in zip(("gpu", "gpu.sm", "gpu.count", "gpu.memory_gb"), ("none", 0, 0, 0), strict=True)
        ),
        Fact("model.moe", False, "config.json"),
        Fact("model.layers", 2, "config.json"),
        Fact("rollout.precision", "bf16", "default", flag="--rollout-precision"),
    ]
)


def test_a_gpu_by_name_brings_what_is_known_of_it():
    facts = detect.override(HOST, ["gpu=b200", "gpu.count=8"])
    assert [facts.value(n) for n in ("gpu", "gpu.sm", "gpu.memory_gb", "gpu.count")] == ["B200", 100, 192, 8]
    assert facts["gpu.sm"].origin == "--fact gpu=b200"


def test_facts_can_be_declared_unknown():
    assert detect.override(HOST, ["gpu=unknown"])["gpu.sm"].state is State.UNKNOWN
    assert detect.override(HOST, ["model.moe=unknown"])["model.moe"].state is State.UNKNOWN
    assert detect.override(HOST, ["model.moe=true"]).value("model.moe") is True
    assert detect.override(HOST, ["hardware=8xMI325"]).value("gpu") == "MI325X"
    assert detect.override(HOST, ["gpu=mi350"]).value("gpu.memory_gb") == 288
    assert detect.override(HOST, ["gpu=none"]).value("gpu.sm") == 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("gpu", "write NAME=VALUE"),
        ("gpu.smm=90", "did you mean gpu.sm"),
        ("rollout.precision=fp8", "is an option, give --rollout-precision fp8"),
        ("plugin.r3=true", "activate plugins with --plugins r3"),
        ("gpu=B20", "no GPU of that name is known; did you mean B200"),
        ("gpu.count=x", "--fact gpu.count=x: gpu.count must be a whole number of at least 0"),
        ("gpu.sm=9.0", "gpu.sm must be a whole number"),
        ("model.layers=0", "model.layers must be a whole number of at least 1"),
        ("model.moe=1", "model.moe must be true, false or unknown"),
    ],
)
def test_an_override_that_is_none_is_refused(given, reason):
    with pytest.raises(ConfigError, match=reason):
        detect.override(HOST, [given])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 16},
        {"rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 16}},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 16}}},
    ],
)
def test_the_context_ends_where_rotary_frequencies_begin_to_change(rope):
    facts = {f.name: f for f in detect.config_facts({"model_type": "x", "max_position_embeddings": 64, **rope})}
    assert facts["model.context"].value == 16 and "changes its frequencies" in facts["model.context"].origin


def test_the_context_of_other_scalings_is_the_stated_one():
    rope = {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 16}}
    facts = {f.name: f.value for f in detect.config_facts({"model_type": "x", "max_position_embeddings": 64, **rope})}
    assert facts["model.context"] == 64
