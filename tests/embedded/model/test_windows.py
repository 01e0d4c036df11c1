"""Which models have layers that attend to fewer than all previous tokens."""

import pytest
import torch
import transformers

from miles_embedded import has_windows
from miles_embedded.model.windows import mask_for
from miles_embedded.testing import families


@pytest.mark.parametrize(
    ("family", "windows", "builds"),
    [
        ("qwen3_moe", False, False),
        ("gpt_oss", True, True),
        ("qwen3_next", False, True),
        ("bamba", False, True),
        ("lfm3", True, True),
    ],
)
def test_layers_with_a_state_are_no_windows(family, windows, builds):
    if families.lacking(family):
        pytest.skip(families.lacking(family))
    name, values = families.FAMILIES[family]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**values))
    assert has_windows(model) is windows
    assert (mask_for(model) is None) is builds  # whose layers read a mask as padding
