"""What cannot be exact is refused when the run is planned, with the reason."""

import pytest

from miles_core.errors import PlanError
from miles_testing.toy import plan

INT4 = {"int4_group_size": 16}


@pytest.mark.parametrize(
    ("plugins", "options", "facts", "because"),
    [
        ([], {"device": "cuda"}, ["gpu=H200"], "proven on CPUs only"),
        (["cpu_kernels"], {"device": "cpu"}, [], "adds? in another order"),
        (["int4"], {"rollout_precision": "int4", **INT4}, [], "than a plain trainer"),
        ([], {"kv_cache_dtype": "float8_e4m3fn"}, [], "rounded keys and values"),
        (["lora"], {}, [], "base plus adapters as one matrix"),
        ([], {"family": "deepseek_v32"}, [], "indexers choose"),
    ],
)
def test_it_is_refused(plugins, options, facts, because):
    with pytest.raises(PlanError, match=because):
        plan(["true_on_policy", *plugins], facts, **options)


def test_its_flag_enables_it():
    assert "true_on_policy" in plan(true_on_policy_mode=True).order
