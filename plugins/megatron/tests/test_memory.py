"""The memory of a rank, computed by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from miles_megatron import count, families
from miles_megatron.architecture import Kind
from miles_megatron.memory import CHANNELS, CONTEXT, Work, fits, layer_elements, memory, peak
from miles_megatron.sizes import Sizes

#: Configurations of published checkpoints, as far as they decide sizes.
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())

LLAMA = families.read(PUBLISHED["LLAMA3_8B"])
DEEPSEEK = families.read(PUBLISHED["DEEPSEEK_V3"])


def test_what_stays_on_one_rank():
    (stage,) = memory(LLAMA, Sizes(), Work(tokens=1, micro_batches=1))
    parameters = count.model(LLAMA).total
    assert (stage.weights, stage.gradients, stage.optimiser) == (2 * parameters, 4 * parameters, 12 * parameters)
    assert stage.other == CONTEXT


def test_the_optimiser_is_divided_among_copies_and_tensors_among_ranks():
    work = Work(tokens=1, micro_batches=1)
    two, four = (memory(LLAMA, Sizes(ranks=n, tp=2, etp=2, sequence=True), work)[0] for n in (2, 4))
    norms = 2 * (32 * 2 * 4096 + 4096)
    assert two.weights == count.model(LLAMA).total - norms / 2 + norms
    assert four.weights == two.weights and four.optimiser == two.optimiser / 2
    assert two.other == CONTEXT + CHANNELS


def test_experts_are_divided_by_their_own_sizes():
    work = Work(tokens=1, micro_batches=1)
    one, other = (memory(DEEPSEEK, Sizes(ranks=64, ep=n), work)[0] for n in (1, 64))
    experts = count.model(DEEPSEEK).experts
    assert one.weights - other.weights == pytest.approx(2 * experts * 63 / 64)
    assert one.optimiser == pytest.approx(12 * count.model(DEEPSEEK).total / 64)
    assert other.optimiser == pytest.approx(one.optimiser)


def test_stages_hold_their_layers_and_ends():
    stages = memory(LLAMA, Sizes(ranks=4, pp=4), Work(tokens=1, micro_batches=8))
    table = 2 * LLAMA.vocab * LLAMA.hidden
    assert [s.layers for s in stages] == [8] * 4
    assert stages[0].weights - stages[1].weights == table
    assert stages[3].weights - stages[1].weights == table + 2 * LLAMA.hidden


def test_a_layer_s_activations():
    h, q, kv, f = 4096, 4096, 1024, 14336
    # two norms' inputs and outputs; queries, keys, values, output; gate, up, their product
    assert layer_elements(LLAMA, Sizes(), Kind()) == 4 * h + 2 * q + 2 * kv + 3 * f
    split = layer_elements(LLAMA, Sizes(ranks=2, tp=2, etp=2, sequence=True), Kind())
    assert split == layer_elements(LLAMA, Sizes(), Kind()) / 2


def test_earlier_stages_hold_more_micro_batches():
    stages = memory(LLAMA, Sizes(ranks=4, pp=4), Work(tokens=1000, micro_batches=8))
    per = 2 * 1000 * (8 * layer_elements(LLAMA, Sizes(), Kind()))
    assert stages[1].activations - stages[2].activations == pytest.approx(per)


def test_recomputation_keeps_a_layer_s_input():
    work = Work(tokens=1000, micro_batches=1, recompute="full")
    plain, saving = (memory(LLAMA, Sizes(), w)[0].activations for w in (Work(1000, 1), work))
    kept = 2 * 1000 * (32 * LLAMA.hidden + layer_elements(LLAMA, Sizes(), Kind()))
    others = plain - 2 * 1000 * 32.5 * layer_elements(LLAMA, Sizes(), Kind())
    assert saving == pytest.approx(kept + others)


def test_an_mtp_layer_is_on_the_last_stage_with_a_copy_of_the_embedding():
    sizes, plain = Sizes(ranks=4, pp=4, first=16, last=15), Work(tokens=1000, micro_batches=1)
    without, trained = (memory(DEEPSEEK, sizes, w) for w in (plain, replace(plain, mtp=True)))
    assert without[:3] == trained[:3]
    layer, table = count.mtp_layer(DEEPSEEK).total, DEEPSEEK.vocab * DEEPSEEK.hidden
    more = {name: vars(trained[3])[name] - vars(without[3])[name] for name in vars(trained[3])}
    assert more["weights"] == 2 * (layer + table)
    assert (more["gradients"], more["optimiser"]) == (4 * layer, 12 * layer)
    assert more["activations"] > 2 * 1000 * layer_elements(DEEPSEEK, Sizes(), Kind(sparse=True))
    assert memory(DEEPSEEK, Sizes(), replace(plain, mtp=True))[0].weights == 2 * count.model(DEEPSEEK, 1).total


@pytest.mark.parametrize(
    "s", [Sizes(8, pp=8), Sizes(64, tp=8, pp=4, first=10, last=3), Sizes(64, pp=16, first=1, ep=4), Sizes(2, tp=2)]
)
def test_the_largest_stage_decides_whether_a_model_fits(s):
    work = Work(tokens=4096, micro_batches=3, mtp=True)
    for model in (LLAMA, DEEPSEEK):
        model = replace(model, layers=s.pp * 4 + 1, sparse=(False,) * 3 + (True,) * (s.pp * 4 - 2))
        most = max(stage.total for stage in memory(model, s, work))
        assert peak(model, s, work) == most
        assert fits(model, s, work, most) and not fits(model, s, work, most - 1)
