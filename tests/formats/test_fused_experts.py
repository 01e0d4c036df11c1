import pytest
import torch

from miles_core.errors import CheckpointError
from miles_formats.convert.joined_experts import put_together
from miles_formats.fused_experts import JOININGS, Family, split_experts

EXPERTS, WIDTH, INNER = 3, 4, 6
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def matrices():
    """Gate and up of every expert, all numbers different."""
    numbers = torch.arange(EXPERTS * 2 * INNER * WIDTH, dtype=torch.float32)
    return numbers.reshape(EXPERTS, 2, INNER, WIDTH)


@pytest.mark.parametrize("model_type", JOININGS)
def test_gate_and_up_are_found_where_the_family_has_them(model_type):
    layout, every = JOININGS[model_type], matrices()
    joined = every.transpose(1, 2).flatten(1, 2) if layout.interleaved else every.flatten(1, 2)
    joined = joined.transpose(1, 2).contiguous() if layout.transposed else joined
    found = split_experts(NAME, tuple(joined.shape), Family(model_type))
    assert [x.name.split("experts.")[1] for x in found[:3]] == [
        "0.gate_proj.weight",
        "0.up_proj.weight",
        "1.gate_proj.weight",
    ]
    assert len(found) == 2 * EXPERTS
    for x in found:
        assert torch.equal(x.of(joined[x.index]), every[x.index, x.half])
        strided = torch.empty(EXPERTS, *(2 * n for n in joined.shape[1:]))[:, ::2, ::2].copy_(joined)
        assert torch.equal(x.of(strided[x.index]), every[x.index, x.half])
    shapes = {x.name: x.shape for x in found} | {
        f"model.layers.0.mlp.experts.{e}.down_proj.weight": (WIDTH, INNER) for e in range(EXPERTS)
    }
    gate_up, down = put_together(shapes, Family(model_type))
    assert gate_up.name == NAME and gate_up.shape == tuple(joined.shape)
    again = torch.stack([gate_up.slab(list(every[e])) for e in range(EXPERTS)])
    assert torch.equal(again, joined)
    assert down.shape == ((EXPERTS, INNER, WIDTH) if layout.transposed else (EXPERTS, WIDTH, INNER))


@pytest.mark.parametrize(("part", "shape"), [("gate_up_proj", (3, 12, 4)), ("down_proj", (3, 4, 6))])
def test_the_models_width_tells_the_other_way_round(part, shape):
    """Transformers saves qwen3_vl_moe [E, 2I, H], its published checkpoints are [E, H, 2I]."""
    name = f"model.layers.0.mlp.experts.{part}"
    turned = (shape[0], shape[2], shape[1])
    for stored, transposed in ((shape, False), (turned, True)):
        found = split_experts(name, stored, Family("qwen3_vl_moe", WIDTH))
        assert {x.transposed for x in found} == {transposed}
        assert {x.shape for x in found} == {(6, 4) if part == "gate_up_proj" else (4, 6)}
    with pytest.raises(CheckpointError, match=r"does not fit the model's hidden_size of 5 either way round"):
        split_experts(name, shape, Family("qwen3_vl_moe", 5))


def test_the_family_is_that_of_the_language_model():
    text = {"model_type": "qwen3_5_moe_text", "hidden_size": 4}
    assert Family.of({"model_type": "wrapped", "text_config": text}) == Family("qwen3_5_moe_text", 4)
    assert Family.of({"model_type": "llama4", "text_config": {"hidden_size": 8}}) == Family("llama4", 8)
    assert Family.of({"model_type": "qwen3", "hidden_size": 8}) == Family("qwen3", 8)
    assert Family.of({}).joining is None


def test_what_is_not_known_is_refused_by_name():
    for name, shape, family in (
        (NAME, (3, 4, 12), Family("aria")),
        ("a.experts.fc1.weight", (3, 4, 12), Family("llama4")),
        (NAME, (3, 4, 6, 2), Family("llama4")),
    ):
        with pytest.raises(CheckpointError, match=r"holds all experts of a layer.*leave the experts alone"):
            split_experts(name, shape, family)
    with pytest.raises(CheckpointError, match=r"equal halves of 11"):
        split_experts(NAME, (3, 4, 11), Family("llama4"))
