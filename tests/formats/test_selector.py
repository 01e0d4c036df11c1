import pytest
import torch
import transformers

from miles_core.errors import ConfigError
from miles_embedded.model.views import views
from miles_formats.selector import Selector, matches, routers

LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    f"{LAYER}.input_layernorm.weight": (8,),
    f"{LAYER}.self_attn.q_proj.weight": (8, 8),
    f"{LAYER}.self_attn.q_proj.bias": (8,),
    f"{LAYER}.self_attn.q_norm.weight": (4,),
    f"{LAYER}.mlp.gate.weight": (4, 8),
    f"{LAYER}.mlp.gate.e_score_correction_bias": (4,),
    f"{LAYER}.mlp.shared_expert_gate.weight": (1, 8),
    f"{LAYER}.mlp.experts.0.gate_proj.weight": (8, 8),
    f"{LAYER}.mlp.experts.0.down_proj.weight": (8, 8),
    "model.layers.1.eh_proj.weight": (8, 16),
    f"{LAYER}.mamba.dt_proj.weight": (8, 4),
    "lm_head.weight": (32, 8),
}


def chosen(*skip):
    selector = Selector(skip)
    return {n for n, shape in SHAPES.items() if selector(n, shape)}


def test_only_matrices_of_linear_layers_and_experts_are_quantised():
    assert chosen() == {
        f"{LAYER}.self_attn.q_proj.weight",
        f"{LAYER}.mlp.experts.0.gate_proj.weight",
        f"{LAYER}.mlp.experts.0.down_proj.weight",
    }


@pytest.mark.parametrize(
    ("selector", "name", "found"),
    [
        ("layer_norm", f"{LAYER}.input_layernorm.weight", True),
        ("q_proj", f"{LAYER}.self_attn.q_proj.weight", True),
        ("qproj", f"{LAYER}.self_attn.q_proj.weight", True),
        ("*.q_proj.weight", f"{LAYER}.self_attn.q_proj.weight", True),
        ("*.q_proj", f"{LAYER}.self_attn.q_proj.weight", False),
        ("*layer_norm*", f"{LAYER}.input_layernorm.weight", False),
        ("mlp.gate", f"{LAYER}.mlp.gate_proj.weight", True),
        ("*.mlp.gate.*", f"{LAYER}.mlp.gate_proj.weight", False),
        ("layers.1.", "model.layers.11.mlp.up_proj.weight", False),
    ],
)
def test_the_dialect(selector, name, found):
    assert matches(selector, name) is found


def test_users_selectors_add_to_what_is_left_alone():
    assert chosen("down_proj", "*.self_attn.*") == {f"{LAYER}.mlp.experts.0.gate_proj.weight"}
    reason = Selector(("down_proj",), "--my-skip").reason(f"{LAYER}.mlp.experts.0.down_proj.weight", (8, 8))
    assert reason == "--my-skip: down_proj"


def test_a_selector_that_matches_nothing_is_an_error_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"--my-skip: 'dwn_proj' matches none of .* tensors; nearest: .*down_proj"):
        Selector(("dwn_proj",), "--my-skip").check(SHAPES)


@pytest.mark.parametrize("habit", ["lm_head", "embed", "layer_norm"])
def test_habitual_selectors_may_match_nothing(habit):
    shapes = {f"{LAYER}.self_attn.q_proj.weight": (8, 8)}
    assert [habit in note for note in Selector((habit,)).check(shapes)] == [True]


def test_a_selector_of_what_is_never_quantised_is_a_note():
    assert ["changes nothing" in note for note in Selector(("lm_head", "q_proj")).check(SHAPES)] == [True]


def test_leaving_everything_alone_is_an_error():
    with pytest.raises(ConfigError, match="nothing to quantise"):
        Selector(("proj",)).check(SHAPES)


def test_an_empty_selector_is_an_error():
    with pytest.raises(ConfigError, match="empty"):
        Selector(("q_proj", ""))


def test_experts_in_one_checkpoint_tensor_are_refused_by_name_or_left_alone():
    name = f"{LAYER}.mlp.experts.gate_up_proj"
    with pytest.raises(ConfigError, match="holds all experts of a layer"):
        Selector()(name, (4, 8, 16))
    assert not Selector(("experts",))(name, (4, 8, 16))


@pytest.mark.parametrize(
    ("family", "values", "routers"),
    [
        ("Qwen2Moe", {"num_experts": 2, "shared_expert_intermediate_size": 8}, ("gate", "shared_expert_gate")),
        ("DeepseekV3", {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, ("gate",)),
        ("Mixtral", {"num_local_experts": 2}, ("gate",)),
        ("MiniMaxM2", {"num_local_experts": 2}, ("gate",)),
    ],
)
def test_routers_of_real_families_are_never_quantised(family, values, routers):
    config = getattr(transformers, f"{family}Config")(
        vocab_size=16, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2, **values
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    selector = Selector()
    kept = {v.name.split(".")[-2] for v in views(model) if len(v.size) == 2 and not selector(v.name, v.size)}
    assert kept == {"embed_tokens", "lm_head", *routers}
    assert any(".experts." in v.name and selector(v.name, v.size) for v in views(model))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.block_sparse_moe.router.layer.weight",  # GraniteMoE
        "model.layers.0.router.proj.weight",  # Gemma 4
        "model.language_model.layers.0.altup.modality_router.weight",  # Gemma 3n
        "model.language_model.layers.0.altup.prediction_coefs.weight",
        "model.layers.0.mlp.gate.wg.weight",  # Hunyuan
        "model.layers.0.feed_forward.router.weight",  # Llama 4
    ],
)
def test_routers_by_their_names_in_other_families(name):
    assert Selector().reason(name, (64, 64))
    assert not Selector().reason("model.layers.0.mlp.gate_proj.weight", (64, 64))


def test_routers_are_found_by_what_they_are():
    """Beside single experts, joined ones and ones joined under another name; not what has other matrices too."""
    shapes = {
        **SHAPES,
        f"{LAYER}.mlp.experts.3.gate_proj.weight": (8, 8),
        f"{LAYER}.mlp.chooser.inner.weight": (4, 8),
        f"{LAYER}.mlp.wide.a.weight": (4, 8),
        f"{LAYER}.mlp.wide.b.weight": (8, 8),
        "model.layers.1.experts.gate_up_proj": (6, 16, 8),
        "model.layers.1.scorer.weight": (6, 8),
        "model.layers.2.moe.input_linear.weight": (5, 16, 8),
        "model.layers.2.moe.choice.layer.weight": (5, 8),
        "model.layers.2.mixer.conv1d.weight": (8, 1, 4),
        "model.layers.2.mixer.in_proj.weight": (8, 8),
    }
    found = {f"{LAYER}.mlp.gate.weight", f"{LAYER}.mlp.chooser.inner.weight", "model.layers.1.scorer.weight"}
    found |= {"model.layers.2.moe.choice.layer.weight"}
    assert routers(shapes) == found
    selector = Selector()
    assert selector("model.layers.1.scorer.weight", (6, 8))
    selector.settle(shapes)
    assert selector.reason("model.layers.1.scorer.weight", (6, 8)) == "never quantised: it scores experts"
    assert [n for n in selector.check(shapes) if "1 tensors hold the experts of a layer" in n]
