"""A format that is for some weights only, such as experts."""

import pytest

from miles_core.errors import ConfigError
from miles_formats.selector import Selector

LAYER = "model.layers.0"
SHAPES = {
    f"{LAYER}.self_attn.q_proj.weight": (8, 8),
    f"{LAYER}.mlp.gate.weight": (4, 8),
    f"{LAYER}.mlp.experts.0.down_proj.weight": (8, 8),
    f"{LAYER}.mlp.experts.1.down_proj.weight": (8, 8),
    f"{LAYER}.mlp.shared_experts.down_proj.weight": (8, 8),
}
EXPERTS = ("*.experts.*",)


def chosen(selector):
    return [name for name, shape in SHAPES.items() if selector(name, shape)]


def test_only_limits_what_is_quantised():
    selector = Selector(only=EXPERTS, only_origin="--my-scope")
    assert chosen(selector) == [f"{LAYER}.mlp.experts.{i}.down_proj.weight" for i in (0, 1)]
    assert selector.reason(f"{LAYER}.self_attn.q_proj.weight", (8, 8)) == "--my-scope: not among *.experts.*"


def test_users_selectors_narrow_it_further():
    assert chosen(Selector(("experts.1.",), only=EXPERTS)) == [f"{LAYER}.mlp.experts.0.down_proj.weight"]


def test_a_selector_of_what_the_format_is_not_for_is_a_note():
    (note,) = Selector(("q_proj",), "--my-skip", only=EXPERTS).check(SHAPES)
    assert note.startswith("--my-skip: 'q_proj' changes nothing")


def test_a_model_with_nothing_the_format_is_for_is_refused():
    dense = {f"{LAYER}.self_attn.q_proj.weight": (8, 8)}
    with pytest.raises(ConfigError, match=r"--my-scope: none of the model's 1 tensors is among \*\.experts\.\*"):
        Selector(only=EXPERTS, only_origin="--my-scope").check(dense)
