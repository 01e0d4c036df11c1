import pytest
import torch

from miles_core.plugin import PlanError
from miles_r3 import ROUTES
from miles_r3.deterministic import lowest_first_top_k, router_logits
from miles_r3.routers import router_of
from miles_testing import plan

FAMILIES = ("qwen3_moe", "deepseek_v3", "deepseek_v32", "glm4_moe", "minimax_m2", "mixtral", "gpt_oss")


def test_ties_go_to_the_lower_index_in_ascending_order():
    scores = torch.tensor([[1.0, 3, 3, 3, 2], [0, 0, 0, 0, 0], [5, 4, 3, 2, 1]])
    assert lowest_first_top_k(scores, 2).tolist() == [[1, 2], [0, 1], [0, 1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_ties_are_decided_by_index_in_every_family(block_with_call, family):
    """All experts score alike, so that only the rule of ties decides; without it, the order is the kernel's."""
    block, run = block_with_call(family, deterministic=True)
    router = router_of(block)
    with torch.no_grad():
        router.weight.copy_(router.weight[:1].expand_as(router.weight))
        for name, value in [*block.named_parameters(), *block.named_buffers()]:
            if name.endswith(("e_score_correction_bias", "router.bias")):
                value.zero_()
    call = run("rollout")
    assert call.extras[ROUTES.name].unique(dim=0).flatten().tolist() == [0, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_chooses_what_the_family_chooses_where_nothing_ties(block_with_call, family):
    """Same sets as the module's own router; group limits and correction biases included."""
    _, plain = block_with_call(family, deterministic=False)
    _, exact = block_with_call(family, deterministic=True)
    own, found = (run("rollout").extras[ROUTES.name] for run in (plain, exact))
    assert torch.equal(own.sort(-1)[0], found) and len(found.unique(dim=0)) > 3


def test_a_row_s_logits_do_not_depend_on_its_neighbours():
    router = torch.nn.Linear(48, 8)
    rows = torch.randn(70, 48, generator=torch.Generator().manual_seed(0))
    whole = router_logits(router, rows)
    for size in (1, 2, 3, 5, 31, 33):
        assert torch.equal(router_logits(router, rows[:size]), whole[:size])
    assert router_logits(router.bfloat16(), rows.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "minimax_m2"])
def test_engine_and_trainer_agree_in_a_run(toy_run, family):
    run = toy_run(["r3"], steps=2, family=family, deterministic_expert_routing=True, kl_loss_coef=0.1)
    for record in run.metrics:
        assert record["r3/routers_differing"] == 0 and record["mismatch/abs_log_prob"] < 1e-4


def test_megatron_has_its_own_rule_and_the_refusal_says_what_to_do():
    given = {"trainer": "megatron", "facts": ["hardware=8xH200", "model.type=qwen3_moe"], "runtime": "ray"}
    with pytest.raises(PlanError, match=r"Megatron-Core's router(?s:.*)r3 replays the engine's choices"):
        plan(["r3"], deterministic_expert_routing=True, **given)


def test_other_backends_cannot_be_told_to(tmp_path):
    path = tmp_path / "elsewhere.py"
    path.write_text(
        "from miles_core.plugin import Plugin\n"
        "plugin = Plugin(name='elsewhere', summary='another engine', version='1', core='>=0',\n"
        "    provides={'engine': {'elsewhere': 'make'}}, capabilities={'engine': ('routed_experts',)})\n"
        "def make():\n    raise AssertionError\n"
    )
    options = {"deterministic_expert_routing": True, "engine": "elsewhere"}
    with pytest.raises(PlanError, match="choose experts by the same rule"):
        plan([str(path), "r3"], **options)
    assert plan([str(path), "r3"], engine="elsewhere").order
