"""Models whose modules compute with compiled steps give what they give without, and stay the same models otherwise."""

import importlib
import logging

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from miles_core.contracts.trainer import Context
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError
from miles_core.testing import toy_run
from miles_core.testing.tiny import FAMILIES, ROUTER_FAMILIES, tiny_checkpoint
from miles_embedded.cpu import experts, install, linear, operations
from miles_embedded.cpu.install import use_kernels
from miles_embedded.engine import attention as attend
from miles_embedded.engine.runner import Runner
from miles_embedded.model.load import backbone, load_model
from miles_embedded.model.logprobs import logits_of, token_log_probs
from miles_embedded.trainer import attention
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.packing import pack

pytestmark = pytest.mark.usefixtures("kernels")

_ALWAYS = {"rms_norm", "linear", "log_probs"}
_ATTENTION = {"tree_attention", "cached_attention"}
#: What each family's modules compute with. Sinks, windows and an indexer are not what the compiled attention does; gpt_oss
#: has another rotation and other experts, the rotations of the families without it are of a part of the numbers.
USED = {
    "llama": _ALWAYS | _ATTENTION | {"rotate"},
    "qwen3": _ALWAYS | _ATTENTION | {"rotate"},
    "qwen3_moe": _ALWAYS | _ATTENTION | {"rotate", "experts"},
    "deepseek_v3": _ALWAYS | _ATTENTION | {"experts"},
    "deepseek_v32": _ALWAYS | {"experts"},
    "gpt_oss": _ALWAYS,
    "glm4_moe": _ALWAYS | _ATTENTION | {"experts"},
    "mixtral": _ALWAYS | _ATTENTION | {"rotate", "experts"},
    "minimax_m2": _ALWAYS | _ATTENTION | {"experts"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """``checkpoint(family)``, made once."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tiny_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(autouse=True)
def classes_of_its_own():
    """Each test changes classes as the first in a process does."""
    install._norm_class.cache_clear()
    install._rotation_class.cache_clear()


@pytest.fixture
def used(monkeypatch):
    """Names of the steps that were called, on a processor that all of them are for."""
    names = set()

    def watch(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: names.add(name) or original(*a, **k))

    for name in ("rms_norm", "rotate", "linear", "log_probs", *_ATTENTION):
        watch(operations, name)
    watch(experts, "experts")
    # In place of the measured thresholds, which may change.
    monkeypatch.setattr(linear, "ROWS", 64)
    monkeypatch.setattr(attention, "_COMPILED", 100)
    monkeypatch.setattr(attend, "_COMPILED", 100)
    monkeypatch.setattr(install, "pays", lambda: True)
    monkeypatch.setattr(experts, "_x86", lambda: True)
    monkeypatch.setattr(experts, "available", lambda: False)
    return names


def plain_linear(model):
    """Where another library is faster, layers are its own by now; here they are to be those that can be changed."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = nn.Linear
    return model


def packed():
    """Prompts with and without siblings, more rows than compiled layers need."""
    generator = np.random.default_rng(0)
    samples = []
    for group, (prompt, responses) in enumerate(((5, (7, 3, 1)), (9, (2, 30)), (20, (1,)), (3, (20, 18, 19)))):
        head = generator.integers(2, 60, prompt).tolist()
        for n in responses:
            tail = generator.integers(2, 60, n).tolist()
            samples.append(Sample(tokens=head + tail, response_length=n, group_index=group, index=len(samples)))
    batch = collate(samples)
    return batch, pack(batch)


def trained(model):
    """Logits of a packed forward, log-probs, and the gradients of all parameters."""
    batch, packing = packed()
    call = PackedCall(Context("train", (0,), packing.rows), packing)
    hidden = backbone(model)(
        input_ids=batch.tokens[packing.rows].unsqueeze(0),
        position_ids=packing.positions.unsqueeze(0),
        use_cache=False,
        call=call,
    ).last_hidden_state[0]
    log_probs, _ = token_log_probs(model, hidden[packing.sources], batch.tokens[packing.targets])
    weight = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(0))
    (log_probs * weight).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits_of(model, hidden).detach(), "log_probs": log_probs.detach(), **grads}


def decoded(model):
    """Logits of prompts and of rows that share them, one and several tokens a row."""
    runner, generator = Runner(model), np.random.default_rng(1)
    prompts = [generator.integers(2, 60, n).tolist() for n in (4, 11, 7)]
    where, hidden, _ = runner.prompts(prompts, set())
    found = [runner.head(hidden)]
    slots = runner.cache.add_rows(where[generator.integers(0, 3, 66)])
    for most in (1, 3, 1):
        order = generator.permutation(slots)
        fed = [generator.integers(2, 60, generator.integers(1, most + 1)).tolist() for _ in order]
        found.append(runner.forward(order, fed, set()).logits)
    return torch.cat(found).detach()


@pytest.mark.parametrize("family", [*FAMILIES, *ROUTER_FAMILIES])
def test_every_family_gives_what_it_gives_without(checkpoint, used, family):
    plain, changed = (plain_linear(load_model(checkpoint(family), "float32")) for _ in range(2))
    expected, logits = trained(plain), decoded(plain)
    assert not used
    assert use_kernels(changed, "compiled")
    used.clear()
    found = trained(changed)
    torch.testing.assert_close(decoded(changed), logits, rtol=1e-5, atol=1e-4)
    # Which families rotate halves, of all that there is, differs between releases of Transformers.
    assert used - {"rotate"} == USED[family] - {"rotate"}
    assert "rotate" in used or family not in ("llama", "qwen3", "qwen3_moe")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error, scale = (found[name] - tensor).abs().max(), tensor.abs().max().clamp(min=1)
        assert error <= 2e-5 * scale, f"{name}: {error:.2g} of {scale:.2g}"


def test_names_parameters_and_hooks_stay(checkpoint):
    model = load_model(checkpoint("qwen3_moe"), "float32")
    names = [(n, type(m).__name__, isinstance(m, nn.Linear)) for n, m in model.named_modules()]
    parameters = dict(model.named_parameters())
    layer, seen = model.model.layers[0], []
    watched = [model.model.norm, layer.self_attn, layer.self_attn.q_proj, layer.self_attn.q_norm, layer.mlp.experts]
    for module in watched:
        module.register_forward_hook(lambda m, a, out: seen.append(m))
    use_kernels(model, "compiled")
    assert [(n, type(m).__name__, isinstance(m, nn.Linear)) for n, m in model.named_modules()] == names
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert list(model.state_dict()) == list(load_model(checkpoint("qwen3_moe"), "float32").state_dict())
    decoded(model)
    assert all(module in seen for module in watched)


def test_doing_it_twice_changes_nothing_more(checkpoint):
    model = load_model(checkpoint("qwen3"), "float32")
    use_kernels(model)
    classes, once = [type(m) for m in model.modules()], decoded(model)
    use_kernels(model)
    assert [isinstance(m, c) for m, c in zip(model.modules(), classes, strict=True)] == [True] * len(classes)
    assert torch.equal(decoded(model), once)


def test_transformers_is_not_modified(checkpoint):
    first = load_model(checkpoint("qwen3"), "float32")
    classes = [type(m) for m in first.modules()]
    modules = {c.__module__ for c in classes}
    before = {name: dict(vars(importlib.import_module(name))) for name in modules}
    forwards = {c: dict(vars(c)) for c in classes}
    use_kernels(first, "compiled")
    decoded(first)
    assert [type(m) for m in first.modules()] != classes
    for name, names in before.items():
        now = vars(importlib.import_module(name))
        assert names.keys() == now.keys() and all(now[key] is value for key, value in names.items())
    for kind, attributes in forwards.items():
        assert all(vars(kind)[key] is value for key, value in attributes.items())
    assert [type(m) for m in load_model(checkpoint("qwen3"), "float32").modules()] == classes


_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def transformers_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize(
    ("config", "module", "what"),
    [
        (transformers.GemmaConfig(**_TINY), "model.norm", "adds one to the weight"),
        (transformers.GlmConfig(**_TINY), "model.layers.0.self_attn", "rotates neighbours"),
        (transformers.CohereConfig(**_TINY), "model.layers.0.self_attn", "rotates neighbours"),
    ],
    ids=["gemma", "glm", "cohere"],
)
def test_what_computes_something_else_stays(config, module, what):
    model = transformers_model(config)
    tokens = torch.arange(2, 42).unsqueeze(0)
    with torch.no_grad():
        expected = model(tokens).logits
        kind = type(model.get_submodule(module))
        assert use_kernels(model, "compiled")
        assert type(model.get_submodule(module)) is kind, what
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=2e-5)


class Twice(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return 2 * operations.rms_norm(x, self.weight, self.eps)


class AskedOtherwise(Twice):
    def __init__(self, *, config):
        super().__init__(config)


@pytest.mark.parametrize("kind", [Twice, AskedOtherwise])
def test_a_norm_is_tried_before_it_is_changed(checkpoint, kind):
    named = type("OtherRMSNorm", (kind,), {})
    model = load_model(checkpoint("llama"), "float32")
    model.model.norm = named(32) if kind is Twice else named(config=32)
    use_kernels(model, "compiled")
    assert type(model.model.norm) is named and type(model.model.layers[0].input_layernorm) is not named


def test_a_batch_of_sequences_is_rotated_as_before():
    """Transformers' own way of calling the model: several sequences, whose angles are shared."""
    model = transformers_model(transformers.LlamaConfig(**_TINY))
    tokens = torch.arange(2, 42).view(2, 20)
    with torch.no_grad():
        expected = model(tokens).logits
        use_kernels(model, "compiled")
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=2e-5)


def test_another_dtype_later_stays_with_torch(checkpoint, used):
    model = load_model(checkpoint("qwen3_moe"), "float32")
    use_kernels(model, "compiled")
    used.clear()
    doubled = decoded(model.double())
    assert not used
    torch.testing.assert_close(doubled, decoded(load_model(checkpoint("qwen3_moe"), "float32").double()))


def test_torch_changes_nothing(checkpoint):
    model = load_model(checkpoint("qwen3_moe"), "float32")
    before = [(type(m), dict(vars(m))) for m in model.modules()]
    assert use_kernels(model, "torch") is False
    assert all(type(m) is c and vars(m).keys() == a.keys() for m, (c, a) in zip(model.modules(), before, strict=True))


def test_a_bfloat16_model_has_none(checkpoint):
    model = load_model(checkpoint("qwen3_moe"), "bfloat16")
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ConfigError, match="--cpu-kernels compiled: only a float32 model"):
        use_kernels(model, "compiled")
    assert use_kernels(model, "auto") is False
    assert [type(m) for m in model.modules()] == classes


def test_compiled_kernels_are_told_with_the_flag_that_turns_them_off(checkpoint, caplog):
    install._tell.cache_clear()
    with caplog.at_level(logging.INFO, install.log.name):
        use_kernels(load_model(checkpoint("llama"), "float32"))
    assert "--cpu-kernels torch" in caplog.text


def test_without_a_compiler_auto_says_so_once_and_compiled_is_refused(checkpoint, monkeypatch, caplog):
    model = load_model(checkpoint("llama"), "float32")
    monkeypatch.setattr(install, "why_not", lambda: "no C compiler is here")
    install._tell.cache_clear()
    with caplog.at_level(logging.INFO, install.log.name):
        assert use_kernels(model) is use_kernels(model) is False
    assert [r.getMessage().endswith("no C compiler is here") for r in caplog.records] == [True]
    with pytest.raises(ConfigError, match="--cpu-kernels compiled: no C compiler"):
        use_kernels(model, "compiled")


def test_a_run_computes_as_its_flag_says():
    runs = {kernels: toy_run(device="cpu", cpu_kernels=kernels) for kernels in ("auto", "compiled", "torch")}
    for kernels, run in runs.items():
        for model in (run.engine.model, run.trainer.model):
            assert any(hasattr(module, install.COMPILED) for module in model.modules()) == (kernels != "torch")
    one, two = (runs[kernels].metrics[0]["train/grad_norm"] for kernels in ("compiled", "torch"))
    assert one == pytest.approx(two, rel=1e-4)
