import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

from miles_core.plugin import PluginError, Policy
from miles_core.trainer import Context
from miles_embedded import decoder_layers
from miles_embedded.model.load import NAME, prepare
from miles_r3 import ROUTES
from miles_r3.config import R3Config
from miles_r3.embedded import OWN, RECORDED, REPLAY, moe_blocks, tap
from miles_r3.hooks import R3, disagreement
from miles_testing import toy_files, toy_run

COMMON = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "Qwen3Moe": {"num_experts": 8, "head_dim": 16, "norm_topk_prob": True},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9])


class CausalCall:
    """One sequence, attended to causally."""

    def __init__(self, kind="train"):
        self.ctx = Context(kind, (0, 1), torch.arange(len(TOKENS)))

    def attend(self, module, query, key, value, scaling, options=None):
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


def make(family, tapped=True):
    config = getattr(transformers, f"{family}Config")(**COMMON, **FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=NAME, experts_implementation=NAME
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    prepare(model)
    if tapped:
        tap(model)
    return model


def run(model, call):
    positions = torch.arange(len(TOKENS))
    return model.model(
        input_ids=TOKENS[None], position_ids=positions[None], use_cache=False, call=call
    ).last_hidden_state


def replaying(routes, kind="train"):
    call = CausalCall(kind)
    call.ctx.attached[REPLAY] = routes
    call.ctx.attached[RECORDED] = torch.ones(len(routes), dtype=torch.bool)
    return call


def recorded(model):
    call = CausalCall("rollout")
    with torch.no_grad():
        hidden = run(model, call)
    return hidden, call.ctx.extras[ROUTES.name]


def foreign(model):
    """Routes the model would not choose itself."""
    _, own = recorded(model)
    return (own.long() + 1) % 8


@pytest.fixture(params=FAMILIES)
def model(request):
    return make(request.param)


def test_a_rollout_records_every_rows_choices(model):
    hidden, routes = recorded(model)
    assert routes.shape == (len(TOKENS), len(moe_blocks(model)), 2) and routes.dtype == torch.int8
    assert torch.equal(hidden, run(model, CausalCall("train")))
    assert (routes[..., 0] != routes[..., 1]).all() and routes.min() >= 0 and routes.max() < 8


def test_replaying_the_own_routes_changes_no_bit(model):
    hidden, routes = recorded(model)
    call = replaying(routes.long())
    assert torch.equal(run(model, call), hidden)
    assert all(float(count) == 0 for count, _ in disagreement(call.ctx).values())


def test_foreign_routes_are_the_ones_used(model):
    hidden, own = recorded(model)
    routes = foreign(model)
    used = []
    for block in moe_blocks(model):
        block.experts.register_forward_pre_hook(lambda module, args: used.append(args[1]))
    call = replaying(routes)
    assert not torch.equal(run(model, call), hidden)
    assert torch.equal(torch.stack(used, 1), routes)
    differing, tokens = disagreement(call.ctx)["r3/tokens_differing"]
    assert float(tokens) == len(TOKENS) and float(differing) > 0
    # the first router sees the same input with or without replay
    first = (own[:, 0].long().sort(-1).values != routes[:, 0].sort(-1).values).any(-1).sum()
    assert float(differing) >= float(first)


@pytest.mark.parametrize("kind", ["ref", "train"])
def test_without_routes_the_model_chooses_for_itself(model, kind):
    assert torch.equal(run(model, CausalCall(kind)), recorded(model)[0])


def test_the_routers_gradient_is_that_of_the_gathered_scores():
    model = make("Qwen3Moe")
    routes = foreign(model)
    seen = {}
    block = moe_blocks(model)[0]
    block.gate.register_forward_hook(lambda m, args, out: seen.update(hidden=args[0].detach()))
    block.experts.register_forward_pre_hook(lambda m, args: seen.update(weights=args[2]))
    run(model, replaying(routes))
    coefficients = torch.randn(len(TOKENS), 2, generator=torch.Generator().manual_seed(1))
    (seen["weights"] * coefficients).sum().backward()

    scores = torch.nn.Parameter(block.gate.weight.detach().clone())
    gathered = (seen["hidden"] @ scores.T).softmax(-1).gather(-1, routes[:, 0])
    ((gathered / gathered.sum(-1, keepdim=True)) * coefficients).sum().backward()
    torch.testing.assert_close(block.gate.weight.grad, scores.grad)
    assert scores.grad.abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_replays_the_same_rows(family):
    gradients = []
    for recompute in (False, True):
        model = make(family)
        if recompute:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            for layer in decoder_layers(model):
                layer.training = True
        run(model, replaying(foreign(model))).square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys() and any("gate.weight" in n for n in plain)
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name


def test_routes_of_another_model_are_refused(model):
    routes = foreign(model)
    for wrong in (routes[:, :, :1], routes.repeat(1, 2, 1), routes[:3]):
        with pytest.raises(PluginError, match="same model"):
            run(model, replaying(wrong))


def test_a_dense_model_is_refused():
    config = transformers.Qwen3Config(
        **{k: v for k, v in COMMON.items() if k not in ("moe_intermediate_size", "num_experts_per_tok")}, head_dim=16
    )
    dense = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    with pytest.raises(PluginError, match="no router"):
        tap(dense)


@pytest.mark.parametrize(
    ("role", "tapped"), [("rollout", True), ("train", True), ("shared", True), ("ref", False), ("draft", False)]
)
def test_only_the_policys_models_are_tapped(role, tapped):
    model = make("Qwen3Moe", tapped=False)
    R3(R3Config()).on_model(Policy(), model, role)
    call = CausalCall("rollout")
    run(model, call)
    assert (ROUTES.name in call.ctx.extras) == tapped
    assert OWN not in call.ctx.attached


def test_a_teacher_is_not_tapped_and_may_be_dense(tmp_path):
    dense, file = toy_files("llama") / "model", tmp_path / "policies.yaml"
    file.write_text(f"policies: {{student: {{}}, teacher: {{role: frozen, hf_checkpoint: '{dense}'}}}}")
    (record,) = toy_run(["r3", "distillation"], steps=1, config=file).metrics
    assert record["r3/routers_differing"] < 0.1


def test_modules_that_another_backend_made_are_left_to_it():
    model = make("Qwen3Moe", tapped=False)
    model.config._attn_implementation = "eager"
    R3(R3Config()).on_model(Policy(), model, "train")
    model.config._attn_implementation = NAME
    call = CausalCall("rollout")
    run(model, call)
    assert ROUTES.name not in call.ctx.extras
