"""A model's table of operations: what it replaces, for whom, and what stays."""

import importlib
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from miles_embedded.engine.runner import Runner
from miles_embedded.model.load import load_model
from miles_embedded.model.logprobs import token_log_probs
from miles_embedded.model.operations import TORCH, Operations, operations_of, use_operations
from miles_embedded.model.parts import class_forwards
from miles_testing.tiny import tiny_checkpoint

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


def norm(x, weight, eps):
    return weight * (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())


def rotate(query, key, cosine, sine):
    halves = (x.chunk(2, -1) for x in (query, key))
    turned = (torch.cat([-b, a], -1) for a, b in halves)
    return tuple(x * cosine + y * sine for x, y in zip((query, key), turned, strict=True))


def route(logits, k, normalized):
    weights, index = logits.softmax(-1, dtype=torch.float32).topk(k)
    return (weights / weights.sum(-1, keepdim=True) if normalized else weights).to(logits.dtype), index


@pytest.fixture
def used():
    """Names of the operations that were called, and a table that notes them."""
    names = set()

    def noting(name, function):
        return lambda *arguments: names.add(name) or function(*arguments)

    functions = {
        "norm": norm,
        "rotation": rotate,
        "gate": lambda gate, up: nn.functional.silu(gate) * up,
        "route": route,
    }
    functions |= {name: getattr(TORCH, name) for name in ("experts", "log_probs", "attention")}
    return names, Operations(**{name: noting(name, function) for name, function in functions.items()})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def logits(model, tokens=range(2, 22)):
    runner = Runner(model)
    slots, hidden, _ = runner.prefixes([list(tokens)], set())
    rows = runner.cache.add_rows(slots)
    return torch.cat([runner.head(hidden), runner.forward(rows, [[5, 6, 7]], set()).logits])


def test_every_operation_is_the_tables(checkpoint, used):
    names, table = used
    plain, model = (load_model(checkpoint, "float32") for _ in range(2))
    assert use_operations(model, table) == {
        "norm": 9,
        "rotation": 2,
        "gate": 0,
        "route": 2,
        "delta_rule": 0,
        "of_sum": 0,
    }
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    token_log_probs(model, torch.randn(3, 32), torch.tensor([4, 5, 6]))
    assert names == {"norm", "rotation", "route", "experts", "log_probs", "attention"}


@pytest.mark.parametrize(("activation", "replaced"), [("silu", 2), ("gelu", 0)])
def test_an_mlp_has_the_gate_where_it_is_the_usual_one(tmp_path, used, activation, replaced):
    names, table = used
    plain, model = (load_model(tiny_checkpoint("qwen3", tmp_path, hidden_act=activation), "float32") for _ in range(2))
    assert use_operations(model, table)["gate"] == replaced
    names.clear()  # of the comparison
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    assert ("gate" in names) == bool(replaced)
    use_operations(model, replace(table, gate=None))
    names.clear()
    logits(model)
    assert "gate" not in names


def test_a_table_belongs_to_one_model(checkpoint, used):
    names, table = used
    one, two = (load_model(checkpoint, "float32") for _ in range(2))
    use_operations(one, table)
    assert operations_of(one) is operations_of(one.model.layers[1].mlp.experts) is table
    assert operations_of(two) is operations_of(two.model.layers[1].mlp.experts) is TORCH
    names.clear()  # of the comparison
    logits(two)
    assert not names


def test_torchs_table_takes_everything_back(checkpoint, used):
    names, table = used
    model = load_model(checkpoint, "float32")
    before = logits(model)
    attributes = [set(vars(module)) - {"miles_operations"} for module in model.modules()]
    use_operations(model, table)
    use_operations(model, TORCH)
    names.clear()
    assert torch.equal(logits(model), before) and not names
    assert [set(vars(module)) - {"miles_operations"} for module in model.modules()] == attributes


def test_doing_it_twice_changes_nothing_more(checkpoint, used):
    model = load_model(checkpoint, "float32")
    use_operations(model, used[1])
    once = logits(model)
    assert use_operations(model, operations_of(model)) == {
        "norm": 9,
        "rotation": 2,
        "gate": 0,
        "route": 2,
        "delta_rule": 0,
        "of_sum": 0,
    }
    assert torch.equal(logits(model), once)


def test_names_parameters_classes_and_hooks_stay(checkpoint, used):
    model = load_model(checkpoint, "float32")
    names = [(n, type(m)) for n, m in model.named_modules()]
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    layer, seen = model.model.layers[0], []
    watched = [model.model.norm, layer.self_attn, layer.self_attn.q_proj, layer.self_attn.q_norm, layer.mlp.experts]
    for module in watched:
        module.register_forward_hook(lambda m, a, out: seen.append(m))
    use_operations(model, used[1])
    assert [(n, type(m)) for n, m in model.named_modules()] == names
    assert all(p is parameters[n] for n, p in model.named_parameters()) and list(model.state_dict()) == state
    logits(model)
    assert all(module in seen for module in watched)


def test_transformers_is_not_modified(checkpoint, used):
    model = load_model(checkpoint, "float32")
    classes = {type(m) for m in model.modules()}
    before = {c.__module__: dict(vars(importlib.import_module(c.__module__))) for c in classes}
    forwards = {c: dict(vars(c)) for c in classes}
    use_operations(model, used[1])
    logits(model)
    for name, names in before.items():
        now = vars(importlib.import_module(name))
        assert names.keys() == now.keys() and all(now[key] is value for key, value in names.items())
    for kind, attributes in forwards.items():
        assert all(vars(kind)[key] is value for key, value in attributes.items())


def transformers_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize(
    ("config", "module", "done"),
    [
        (
            transformers.GemmaConfig(**_TINY),
            "model.norm",
            {"norm": 0, "rotation": 1, "gate": 0},
        ),  # adds one to the weight
        (
            transformers.GlmConfig(**_TINY),
            "model.layers.0.self_attn",
            {"norm": 3, "rotation": 0, "gate": 0},
        ),  # rotates neighbours
        (
            transformers.CohereConfig(**_TINY),
            "model.layers.0.self_attn",
            {"norm": 0, "rotation": 0, "gate": 1},
        ),  # likewise
    ],
    ids=["gemma", "glm", "cohere"],
)
def test_what_computes_something_else_stays(config, module, done, used):
    model = transformers_model(config)
    tokens = torch.arange(2, 42).unsqueeze(0)
    with torch.no_grad():
        expected = model(tokens).logits
        assert use_operations(model, used[1]) == {**done, "route": 0, "delta_rule": 0, "of_sum": 0}
        assert "forward" not in vars(model.get_submodule(module))
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=2e-5)


class Twice(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return 2 * norm(x, self.weight, self.eps)


class AskedOtherwise(Twice):
    def __init__(self, *, config):
        super().__init__(config)


@pytest.mark.parametrize("kind", [Twice, AskedOtherwise])
def test_a_norm_is_tried_before_it_is_replaced(checkpoint, used, kind):
    model = load_model(checkpoint, "float32")
    model.model.norm = type("OtherRMSNorm", (kind,), {})(**({"dim": 32} if kind is Twice else {"config": 32}))
    assert use_operations(model, used[1])["norm"] == 8
    assert "forward" not in vars(model.model.norm)


def test_a_batch_of_sequences_is_rotated_as_before(used):
    """Transformers' own way of calling the model: several sequences, whose angles are shared."""
    names, table = used
    model = transformers_model(transformers.LlamaConfig(**_TINY))
    tokens = torch.arange(2, 42).view(2, 20)
    with torch.no_grad():
        expected = model(tokens).logits
        use_operations(model, table)
        names.clear()
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=2e-5)
    assert names == {"norm", "gate"}


def test_another_dtype_later_is_left_to_transformers(checkpoint, used):
    names, table = used
    model = load_model(checkpoint, "float32")
    use_operations(model, replace(TORCH, norm=table.norm, rotation=table.rotation))
    names.clear()
    doubled = logits(model.double())
    assert not names
    assert torch.equal(doubled, logits(load_model(checkpoint, "float32").double()))


def test_attention_is_given_the_call_and_what_the_layer_has_beyond(tmp_path):
    seen = []

    def attention(call, module, query, key, value, scaling, options):
        seen.append((type(call).__name__, call.longest, module.layer_idx, options))
        return call.attend(module, query, key, value, scaling, options)

    model = load_model(tiny_checkpoint("gpt_oss", tmp_path, sliding_window=4), "float32")
    use_operations(model, replace(operations_of(model), attention=attention))
    logits(model, range(2, 12))
    (prompt, longest, first, options), *_ = seen
    assert (prompt, longest, first) == ("PromptCall", 10, 0) and options.sinks is not None
    assert {o.window for _, _, _, o in seen} == {0, 4}
    assert ("DecodeCall", 13) in {s[:2] for s in seen}
    seen.clear()
    logits(model, range(2, 4))
    assert {o.window for name, _, _, o in seen if name == "PromptCall"} == {0}, "no window is wider than the sequences"


def test_replacements_can_be_suspended(checkpoint, used):
    names, table = used
    model = load_model(checkpoint, "float32")
    use_operations(model, table)
    router = model.model.layers[0].mlp.gate
    hidden, replaced = torch.randn(3, 32), vars(router)["forward"]
    names.clear()
    with pytest.raises(ZeroDivisionError), class_forwards(model.model.layers[0]):
        router(hidden)
        assert not names
        raise ZeroDivisionError
    router(hidden)
    assert names == {"route"} and vars(router)["forward"] is replaced
    router.forward = foreign = lambda hidden: hidden
    with class_forwards(router):
        assert vars(router)["forward"] is foreign
