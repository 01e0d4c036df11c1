from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles_core.data import SAMPLING_SUPPORT, Sample, collate
from miles_core.plugin import DataError, PluginError, Policy
from miles_core.trainer import Context, Output
from miles_r3 import ROUTES
from miles_r3.config import R3Config
from miles_r3.embedded import OWN, RECORDED, REPLAY
from miles_r3.hooks import R3, check_routes, disagreement, routes_of_rows, sampled


def batch(routes=True, rollout=True):
    samples = []
    for number, length in enumerate((4, 3)):
        sample = Sample(prompt="", tokens=list(range(length)), response_length=length - 1, index=number)
        if rollout:
            sample.rollout_log_probs = [-1.0] * (length - 1)
        if routes:
            sample.fields[ROUTES.name] = [[[t, 7 - t]] * 2 for t in range(length - 1)]
        samples.append(sample)
    return collate(samples, [ROUTES])


def forward(micro_batch, kind, taken=True):
    ctx = Context(kind, (0, 1), torch.arange(len(micro_batch.tokens)))
    options = SimpleNamespace(run=SimpleNamespace(trainer="elsewhere"))
    run = SimpleNamespace(plan=SimpleNamespace(fact=lambda name, default: 8), config=options)
    seen = []

    def inner(chunk, micro_batch, ctx):
        seen.append(ctx.attached.get(REPLAY))
        if taken:
            ctx.attached[OWN] = {}
        return Output()

    R3(R3Config()).wrap_forward(run, Policy())(inner)(None, micro_batch, ctx)
    return seen[0], ctx


@pytest.mark.parametrize("kind", ["old", "train", "verify"])
def test_policy_passes_replay(kind):
    routes, _ = forward(batch(), kind)
    assert routes.shape == (7, 2, 2)
    assert routes[1].tolist() == [[1, 6], [1, 6]]


@pytest.mark.parametrize("kind", ["old", "train", "verify"])
def test_a_trainer_that_leaves_the_routes_alone_stops_the_run(kind):
    with pytest.raises(PluginError, match="NoneType of --trainer elsewhere did not use the routes"):
        forward(batch(), kind, taken=False)


def test_passes_without_replay_need_nobody_to_take_routes():
    forward(batch(), "ref", taken=False)
    forward(batch(routes=False, rollout=False), "train", taken=False)


def test_reference_passes_do_not():
    assert forward(batch(), "ref")[0] is None


def test_a_supervised_warm_start_routes_for_itself():
    assert forward(batch(routes=False, rollout=False), "train")[0] is None


def test_sampled_tokens_without_routes_are_refused():
    with pytest.raises(PluginError, match="rollout_routed_experts"):
        sampled(batch(routes=False))


def test_rows_without_a_record_get_distinct_valid_experts():
    column = batch().columns[ROUTES.name]
    routes, recorded = routes_of_rows(column, torch.tensor([0, 3, -1, 2, 6]), experts=8)
    assert recorded.tolist() == [True, False, False, True, False]
    assert routes[1].tolist() == [[1, 2]] * 2  # row 1: (1 + arange(2)) mod 8
    assert routes[2].tolist() == [[2, 3]] * 2
    assert routes[0].tolist() == [[0, 7]] * 2 and routes[3].tolist() == [[2, 5]] * 2


def test_the_routes_of_each_layer_are_contiguous():
    """Sorting a layer's choices by expert would otherwise copy them in every layer."""
    column = batch().columns[ROUTES.name]
    routes, _ = routes_of_rows(column, torch.tensor([0, 3, -1, 2, 6]), experts=8)
    assert routes.dtype == torch.int64 and all(routes[:, layer].is_contiguous() for layer in range(routes.shape[1]))


def test_a_rank_without_samples_routes_its_padding():
    empty = batch().columns[ROUTES.name][:0]
    routes, recorded = routes_of_rows(empty, torch.tensor([-1, -1]), experts=8)
    assert routes.tolist() == [[[0, 1]] * 2, [[1, 2]] * 2] and not recorded.any()


@pytest.mark.parametrize("experts", [0, 4])
def test_padding_stays_within_the_experts(experts):
    column = torch.tensor([[[3, 1, 0]], [[-1, -1, -1]]])
    routes, _ = routes_of_rows(column, torch.tensor([0, 1, 1, 1, 1, 1]), experts)
    assert routes.min() >= 0 and routes.max() < 4
    assert (routes.sort(-1).values.diff(dim=-1) > 0).all()


def test_disagreement_is_counted_on_sets_and_recorded_rows_only():
    ctx = Context("train", (0, 1), torch.arange(3))
    ctx.attached[REPLAY] = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [0, 1]]])
    ctx.attached[RECORDED] = torch.tensor([True, True, False])
    ctx.attached[OWN] = {
        0: torch.tensor([[1, 0], [4, 6], [5, 6]]),
        1: torch.tensor([[3, 2], [7, 6], [5, 6]]),
    }
    found = {name: (float(a), float(b)) for name, (a, b) in disagreement(ctx).items()}
    assert found == {"r3/tokens_differing": (1, 2), "r3/routers_differing": (1, 4)}
    assert disagreement(ctx) == {}


def test_every_request_asks_for_routes():
    request = SimpleNamespace(extras=set())
    R3(R3Config()).on_request(request)
    assert request.extras == {ROUTES.name}


@pytest.mark.parametrize("role", ["critic", "frozen"])
def test_models_that_do_not_generate_route_for_themselves(role):
    assert R3(R3Config()).wrap_forward(SimpleNamespace(), Policy(role=role)) is None


@pytest.mark.parametrize(("experts", "dtype"), [(4, "int8"), (128, "int8"), (129, "int16"), (0, "int16")])
def test_the_column_has_the_smallest_dtype_that_holds_the_experts(experts, dtype, tmp_path):
    facts = {"model.num_experts": experts, "model.moe_layers": 2, "model.top_k": 2}
    plan = SimpleNamespace(fact=lambda name, default: facts.get(name, default))
    run = SimpleNamespace(plan=plan, fields=(SAMPLING_SUPPORT, ROUTES), directory=tmp_path)
    r3 = R3(R3Config())
    r3.on_start(run)
    assert [spec.dtype for spec in run.fields] == ["int32", dtype]
    last = (experts or 300) - 1
    recorded = np.array([[[0, last], [last, 1]], [[-1, -1], [-1, -1]]], np.int32)
    sample = Sample(prompt="", tokens=[5, 6, 7], response_length=1, index=0, rollout_log_probs=[-1.0])
    sample.fields[ROUTES.name] = recorded
    r3.on_sample(run, sample)
    column = collate([sample], run.fields).columns[ROUTES.name]
    assert column.dtype == getattr(torch, dtype) and column.tolist() == [*recorded.tolist(), [[-1, -1], [-1, -1]]]
    routes, known = routes_of_rows(column, torch.tensor([0, 1, 2]), experts)
    assert routes[0].tolist() == recorded[0].tolist() and known.tolist() == [True, False, False]


def test_an_expert_that_did_not_fit_into_the_column_is_refused():
    wrapped = np.array([[[3, 200]]], np.uint8).astype(np.int8)
    with pytest.raises(DataError, match=r"the engine used expert 200, but .* has 8 experts"):
        check_routes(0, wrapped, 8, 1, 2)
