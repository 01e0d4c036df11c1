"""Models that compute with the kernels give what they give without."""

import numpy as np
import pytest
import torch

from miles_core.contracts.trainer import Context
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_cpu_kernels import attention, experts, kernels
from miles_cpu_kernels.hooks import use_kernels
from miles_embedded.engine.runner import Runner
from miles_embedded.model.load import load_model
from miles_embedded.model.logprobs import logits_of, token_log_probs
from miles_embedded.model.parts import backbone
from miles_embedded.testing import lacking
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.packing import pack
from miles_testing.tiny import FAMILIES, ROUTER_FAMILIES, tiny_checkpoint

pytestmark = pytest.mark.usefixtures("kernels")

_ALWAYS = {"rms_norm", "log_probs"}
_ATTENTION = {"tree_attention", "cached_attention"}
#: What each family's modules compute with. Sinks, windows and an indexer are not what the compiled attention does; gpt_oss
#: has another rotation and other experts, llama4 and gemma4 other experts, the rotations of the families without it are of a part of
#: the numbers.
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
    "granitemoe": _ALWAYS | _ATTENTION | {"rotate", "experts"},
    "llama4": _ALWAYS | _ATTENTION,
    "gemma4": _ALWAYS | _ATTENTION,
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


@pytest.fixture
def used(monkeypatch):
    """Names of the steps that were called, on a processor that all of them are for."""
    names = set()

    def watch(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: names.add(name) or original(*a, **k))

    for name in ("rms_norm", "rotate", "log_probs", *_ATTENTION):
        watch(kernels, name)
    watch(experts, "experts")
    # In place of the measured thresholds, which may change.
    monkeypatch.setattr(attention, "PACKED_KEYS", 100)
    monkeypatch.setattr(attention, "DECODED_KEYS", 100)
    monkeypatch.setattr("miles_cpu_kernels.table.left_to_torch", lambda: "")
    return names


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
    where, hidden, _ = runner.prefixes(prompts, set())
    found = [runner.head(hidden)]
    slots = runner.cache.add_rows(where[generator.integers(0, 3, 66)])
    for most in (1, 3, 1):
        order = generator.permutation(slots)
        fed = [generator.integers(2, 60, generator.integers(1, most + 1)).tolist() for _ in order]
        found.append(runner.forward(order, fed, set()).logits)
    return torch.cat(found).detach()


@pytest.mark.parametrize("family", [*FAMILIES, *ROUTER_FAMILIES])
def test_every_family_gives_what_it_gives_without(checkpoint, used, family):
    if lacking(family):
        pytest.skip(lacking(family))
    plain, changed = (load_model(checkpoint(family), "float32") for _ in range(2))
    expected, logits = trained(plain), decoded(plain)
    assert not used
    use_kernels(changed)
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


def test_another_dtype_later_stays_with_torch(checkpoint, used):
    model = load_model(checkpoint("qwen3_moe"), "float32")
    use_kernels(model)
    used.clear()
    doubled = decoded(model.double())
    assert not used
    torch.testing.assert_close(doubled, decoded(load_model(checkpoint("qwen3_moe"), "float32").double()))
