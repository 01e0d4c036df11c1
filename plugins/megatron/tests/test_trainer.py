"""The trainer alone and among others: it does what the contract says, and two ranks compute what one computes.

Needs megatron-core; runs on a CPU with its local modules, and gloo.
"""

import json
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from miles_core.plugin import CheckpointError, ConfigError
from miles_core.train.data_shard import merge_metrics
from miles_core.trainer import GIVEN_ROUTES, OWN_ROUTES, Callbacks, OptimizerConfig
from miles_formats import Format, FormatCodec, Stored, store
from miles_megatron.sizes import Sizes
from miles_megatron.testing import MegatronContract, make, may_have_children
from miles_testing import RankedTrainerContract, Setup
from miles_testing.yardstick import make_batch, weighted, yardstick, yardstick_model

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]


class TestMegatron(MegatronContract):
    """Qwen3-MoE."""


class TestTied(TestMegatron):
    family = "llama"


class TestLatent(TestMegatron):
    family = "deepseek_v3"


class TestWholeNorm(TestMegatron):
    family = "minimax_m2"


class TestSinksAndWindows(TestMegatron):
    family = "gpt_oss"
    # the yardstick decays the biases of experts, which the checkpoint keeps in one matrix; Megatron-Core does not
    atol = 1.5e-3


class TestReplicas(RankedTrainerContract):
    """Two replicas."""

    def make(self, checkpoint, setup):
        may_have_children()
        return make(checkpoint, setup)

    @pytest.mark.thorough
    def test_saved_on_two_ranks_and_loaded_on_one_two_and_three(self, ranks, checkpoint, tmp_path):
        super().test_saved_on_two_ranks_and_loaded_on_one_two_and_three(ranks, checkpoint, tmp_path)


#: Of the load-balancing loss: large enough to be seen in every comparison.
BALANCE = 0.5


def worked(checkpoint, **sizes):
    """What a rank computes of its share of a batch: columns before and after a step, and in a step with given routes; metrics, every
    exported weight."""
    setup = replace(Setup(), micro_batch_size=3, entropy=True, recompute=True)
    trainer = make(checkpoint, setup, balance=BALANCE, **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    batch = make_batch()
    mine = [
        i for i, group in enumerate(batch.group.tolist()) if group % trainer.world.replicas == trainer.world.replica
    ]
    part = batch.select(mine)
    found = {name: trainer.log_probs(part, "old", entropy=True)[name] for name in ("log_probs", "entropy")}
    metrics = trainer.step(part)
    found["after"], found["ref"] = (trainer.log_probs(part, kind)["log_probs"] for kind in ("old", "ref"))
    trainer.bind(Callbacks(replaying(trainer, some_routes), weighted, trainer.optimizer_step))
    found["replayed"] = trainer.log_probs(part, "old")["log_probs"]
    metrics |= {f"replayed {name}": value for name, value in trainer.step(part).items()}
    units = {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}
    sent = {n: t.clone() for unit in trainer.units() for n, t in unit.tensors.items()}
    assert bool(sent) == trainer.world.sends
    return {
        "samples": mine,
        "replica": trainer.world.replica,
        "columns": found,
        "metrics": metrics,
        "units": units,
        "sent": sent,
    }


def some_routes(micro_batch, ctx, a):
    """[rows, layers with experts, k]: from the tokens alone."""
    tokens = micro_batch.tokens[ctx.rows.clamp(min=0)] if len(micro_batch.tokens) else torch.zeros_like(ctx.rows)
    layers, k = torch.arange(sum(a.sparse))[None, :, None], torch.arange(a.experts.top_k)
    return (tokens[:, None, None] + layers + k) % a.experts.count


def replaying(trainer, routes, own=None):
    """The trainer's forward with given routes; ``own`` collects what the routers would have chosen."""

    def forward(chunk, micro_batch, ctx):
        ctx.attached[GIVEN_ROUTES] = routes(micro_batch, ctx, trainer.a)
        output = trainer.forward(chunk, micro_batch, ctx)
        if own is not None:
            own.update(ctx.attached[OWN_ROUTES])
        chosen = [experts[ctx.rows >= 0].sum(-1) for experts in ctx.attached[OWN_ROUTES].values()]
        if chosen and ctx.kind == "train":
            ctx.metrics["mine/chosen"] = (torch.stack(chosen).sum(), torch.tensor(torch.stack(chosen).numel()))
        return output

    return forward


SIZES = {
    "tensor": {"tp": 2, "sequence": True},
    "pipeline": {"pp": 2},
    "virtual": {"pp": 2, "virtual": 2},
    "expert": {"ep": 2},
    "context": {"cp": 2},
    "data": {},
}
MARKS = dict.fromkeys(("virtual", "data"), pytest.mark.thorough)


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory):
    from miles_testing import tiny_checkpoint

    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("ranks") / "four", num_hidden_layers=4)


@pytest.fixture(scope="module")
def alone(four_layers):
    return worked(four_layers)


@pytest.mark.parametrize("sizes", [pytest.param(SIZES[name], marks=MARKS.get(name, ()), id=name) for name in SIZES])
def test_two_ranks_compute_what_one_computes(ranks, four_layers, alone, sizes):
    batch = make_batch()
    everyone = ranks.run(worked_with, four_layers, sizes)
    for found in everyone:
        at = torch.cat([torch.arange(int(batch.lengths[i])) + batch.starts[i] for i in found["samples"]])
        for name, column in found["columns"].items():
            torch.testing.assert_close(column, alone["columns"][name][at], rtol=0, atol=5e-5)
        assert found["units"].keys() == alone["units"].keys()
        for name, tensor in found["units"].items():
            torch.testing.assert_close(tensor, alone["units"][name], rtol=0, atol=2e-5)
    assert sorted(name for found in everyone for name in found["sent"]) == sorted(alone["units"])  # each by one rank
    for found in everyone:
        assert all(torch.equal(tensor, found["units"][name]) for name, tensor in found["sent"].items())
    experts = [sum(".experts." in name for name in found["sent"]) for found in everyone]
    assert (experts[0] == experts[1]) == ("ep" in sizes or "pp" in sizes)
    for rank in range(2):  # any rank of a replica may be asked
        replicas = {found["replica"]: found["metrics"] for found in everyone[:: -1 if rank else 1]}
        assert merge_metrics(list(replicas.values())) == pytest.approx(
            merge_metrics([alone["metrics"]]), rel=2e-5, abs=1e-6
        )


def worked_with(checkpoint, sizes):
    return worked(checkpoint, **sizes)


def names_by_stage(checkpoint):
    """Names of this stage's tensors; the second stage reads all of its own while the first one has read a single unit."""
    import torch.distributed as dist

    trainer = make(checkpoint, Setup(), pp=2)
    stream = trainer.units()
    units = [next(stream)]
    if trainer.world.rank == 1:
        units += stream
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return [name for unit in (*units, *stream) for name in unit.tensors]


def test_pipeline_stages_send_at_the_same_time(ranks, four_layers):
    first, second = ranks.run(names_by_stage, four_layers)
    layers = [{int(n.split(".")[2]) for n in names if n.startswith("model.layers.")} for names in (first, second)]
    assert layers == [{0, 1}, {2, 3}] and "lm_head.weight" in second and not set(first) & set(second)


@pytest.mark.thorough
def test_norms_over_all_heads_are_trained_by_the_ranks_that_have_them(ranks, tmp_path):
    from miles_testing import tiny_checkpoint

    checkpoint = tiny_checkpoint("minimax_m2", tmp_path / "model")
    expected, found = worked(checkpoint)["units"], ranks.run(worked_with, checkpoint, {"tp": 2, "sequence": True})[0]
    for name, tensor in found["units"].items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5)


def stepped(checkpoint, sizes):
    """Gradient norm and exported weights of one step."""
    trainer = make(checkpoint, Setup(), **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    norm = trainer.step(make_batch())["train/grad_norm"][0]
    return norm, {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


def test_rotary_keys_of_latent_attention_are_trained_by_the_heads_of_all_ranks(ranks, tmp_path):
    from miles_testing import tiny_checkpoint

    checkpoint = tiny_checkpoint("deepseek_v3", tmp_path / "model")
    norm, expected = stepped(checkpoint, {})
    for found, units in ranks.run(stepped, checkpoint, {"tp": 2, "sequence": True}):
        assert found == pytest.approx(norm, rel=2e-5)
        for name, tensor in units.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5)


def without_gradient_sync(checkpoint):
    """The same step, had nobody summed gradients over replicas."""
    from miles_megatron.trainer import trainer

    with pytest.MonkeyPatch.context() as patch:  # this process computes other tests' ranks afterwards
        patch.setattr(trainer, "finalize_model_grads", lambda *args, **kwargs: None)
        return worked(checkpoint)


def test_gradients_are_summed_over_replicas(ranks, four_layers, alone):
    """Able to fail: without ``finalize_model_grads`` every rank would step on its own samples."""
    found = ranks.run(without_gradient_sync, four_layers)
    norm = "train/grad_norm"
    assert all(f["metrics"][norm][0] != pytest.approx(alone["metrics"][norm][0], rel=1e-3) for f in found)


def stepping(checkpoint, **sizes):
    may_have_children()
    trainer = make(checkpoint, Setup(), **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer


def own_part(trainer):
    batch = make_batch()
    world = trainer.world
    return batch.select([i for i, group in enumerate(batch.group.tolist()) if group % world.replicas == world.replica])


def everything(trainer):
    return {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


def saved(checkpoint, directory, sizes):
    """The weights after two steps; the state after the first one is saved."""
    trainer = stepping(checkpoint, **sizes)
    trainer.step(own_part(trainer))
    trainer.save(directory)
    trainer.step(own_part(trainer))
    return everything(trainer)


def resumed(checkpoint, directory, sizes):
    """The weights after the second step of a trainer that loads the state."""
    trainer = stepping(checkpoint, **sizes)
    trainer.load(directory)
    trainer.step(own_part(trainer))
    return everything(trainer)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "before, after",
    [
        ("pipeline", None),
        ("tensor", "expert"),
        ("expert", "tensor"),
        ("tensor", None),
        ("virtual", "data"),
        (None, "tensor"),
    ],
)
def test_a_checkpoint_goes_on_with_other_sizes(ranks, four_layers, tmp_path, before, after):
    def run(function, name):
        if name is None:
            return function(four_layers, tmp_path, {})
        return ranks.run(function, four_layers, tmp_path, SIZES[name])[0]

    expected, found = run(saved, before), run(resumed, after)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=5e-5)


def test_a_checkpoint_without_a_part_of_the_moments_is_refused(four_layers, tmp_path):
    trainer = stepping(four_layers)
    trainer.step(make_batch())
    trainer.save(tmp_path)
    index = tmp_path / "moments" / "index.json"
    entries = json.loads(index.read_text())
    lost = entries.pop(3)
    index.write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=f"0 of .* elements of {lost['blocks'][0]['key']} .* were saved"):
        trainer.load(tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match="older version of miles-core"):
        trainer.load(tmp_path)


def test_the_embedded_trainer_computes_the_same(alone, four_layers):
    from miles_embedded import load_model
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

    s = Setup()
    rates = OptimizerConfig(lr=s.lr, weight_decay=s.weight_decay, betas=s.betas, eps=s.eps, clip_grad=s.clip_grad)
    config = TrainerConfig(optimizer=rates, temperature=s.temperature, aux_loss_coef=BALANCE)
    trainer = EmbeddedTrainer(load_model(four_layers, torch.float32), config)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    found = trainer.log_probs(make_batch(), "old", entropy=True)
    metrics = merge_metrics([trainer.step(make_batch())])
    found["after"] = trainer.log_probs(make_batch(), "old")["log_probs"]
    for name, column in found.items():
        torch.testing.assert_close(column, alone["columns"][name], rtol=0, atol=5e-5)
    other = merge_metrics([alone["metrics"]])
    assert metrics == pytest.approx({name: other[name] for name in metrics}, rel=2e-5)
    assert {"train/load_balance", "train/expert_imbalance"} <= metrics.keys()


def test_its_own_choices_replayed_change_nothing(four_layers):
    trainer = make(four_layers, replace(Setup(), micro_batch_size=None))
    plain = trainer.log_probs(make_batch(), "old")["log_probs"]

    def routes(micro_batch, ctx, a):
        return some_routes(micro_batch, ctx, a) if own is None else torch.stack([own[i] for i in sorted(own)], 1)

    # each pass is right one layer further, where a layer's choices follow those of the layers before
    own = None
    for _ in range(sum(trainer.a.sparse) + 1):
        found = {}
        trainer.bind(Callbacks(replaying(trainer, routes, found), weighted, trainer.optimizer_step))
        given = trainer.log_probs(make_batch(), "old")["log_probs"]
        own = found
    assert torch.equal(given, plain)


class Tiles(Format):
    """A scale for 8 x 8 weights with codes to 7, and for 8 neighbours of an activation with codes to 127."""

    name, tile, error = "tiles", (8, 8), 0.1

    def storage(self, shape):
        return (Stored("codes", torch.int8, shape), Stored("scales", torch.float32, (shape[0] // 8, shape[1] // 8)))

    def quantize(self, weight, stats=None, out=None):
        tiles = weight.float().unflatten(1, (-1, 8)).unflatten(0, (-1, 8))
        scales = (tiles.abs().amax((1, 3)) / 7).clamp(min=1e-6)
        codes = (tiles / scales[:, None, :, None]).round().to(torch.int8)
        return store({"codes": codes.flatten(2).flatten(0, 1), "scales": scales}, out)

    def dequantize(self, parts):
        return parts["codes"].float() * parts["scales"].repeat_interleave(8, 0).repeat_interleave(8, 1)

    def fake_quantize_activation(self, x):
        groups = x.unflatten(-1, (-1, 8))
        scales = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
        return ((groups / scales).round() * scales).flatten(-2)

    def config(self, unquantized):
        return {"quant_method": self.name}


def in_tiles(checkpoint, **sizes):
    """Log-probs, gradient norm and exported weights of a step in that format."""
    trainer = make(checkpoint, Setup(), codec=FormatCodec(Tiles()), **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    columns = trainer.log_probs(make_batch(), "old")["log_probs"]
    norm = trainer.step(make_batch())["train/grad_norm"][0]
    return columns, norm, {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


def in_tiles_with(checkpoint, sizes):
    return in_tiles(checkpoint, **sizes)


@pytest.mark.thorough
def test_a_number_format_computes_what_the_embedded_trainer_computes_in_it(ranks, four_layers, alone):
    from miles_embedded import load_model
    from miles_embedded.quantized.weights import install
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

    s = Setup()
    rates = OptimizerConfig(lr=s.lr, weight_decay=s.weight_decay, betas=s.betas, eps=s.eps, clip_grad=s.clip_grad)
    model = load_model(four_layers, torch.float32)
    install(model, FormatCodec(Tiles()))
    trainer = EmbeddedTrainer(model, TrainerConfig(optimizer=rates, temperature=s.temperature))
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    expected = trainer.log_probs(make_batch(), "old")["log_probs"]
    norm = trainer.step(make_batch())["train/grad_norm"][0]
    weights = {n: t for unit in trainer.units() for n, t in unit.tensors.items()}
    assert not torch.allclose(expected, alone["columns"]["log_probs"], rtol=0, atol=1e-2)
    two = ranks.run(in_tiles_with, four_layers, {"tp": 2, "sequence": True})[0]
    for columns, found, units in (in_tiles(four_layers), two):
        # a sum in another order may move an activation over the middle between two codes
        close = (columns - expected).abs() < 5e-5
        assert close.float().mean() > 0.9
        assert found == pytest.approx(float(norm), rel=2e-3)
        for name, tensor in units.items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-3)


def test_a_matrix_that_would_be_quantised_in_part_is_refused(four_layers):
    class Some(Tiles):
        skip = ("q_proj",)

    with pytest.raises(ConfigError, match=r"q_proj.weight would stay in BF16, but Megatron-Core joins it"):
        make(four_layers, Setup(), codec=FormatCodec(Some()))


def test_tiles_over_a_joint_are_refused(four_layers):
    class Large(Tiles):
        tile = (32, 8)

    with pytest.raises(ConfigError, match="interleaves heads of 16 rows from several projections, and a tile has 32"):
        make(four_layers, Setup(), codec=FormatCodec(Large()))


def test_mtp_layers_are_exported_as_the_checkpoint_has_them(tmp_path):
    from safetensors.torch import load_file, save_file

    from miles_megatron import families
    from miles_testing import tiny_checkpoint

    file = tiny_checkpoint("deepseek_v3", tmp_path / "from") / "model.safetensors"
    a = families.read(json.loads((tmp_path / "from/config.json").read_text()))
    names = [n for entry in families.weights(a) if entry.name.startswith("mtp.") for n in entry.checkpoint]
    stored = load_file(file) | {name: torch.randn(3) for name in names}
    save_file(stored, file)
    make(tmp_path / "from", Setup()).export(tmp_path / "to", None)
    found = load_file(tmp_path / "to/model.safetensors")
    assert found.keys() == stored.keys() and len(names) > 10
    assert all(torch.equal(found[name], stored[name]) for name in stored)


def test_what_is_fused_on_a_gpu(four_layers, monkeypatch):
    from miles_megatron import families
    from miles_megatron.trainer import model

    monkeypatch.setattr(model, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(model, "TransformerConfig", SimpleNamespace)  # Megatron-Core's would look for TransformerEngine
    a = families.read(json.loads((four_layers / "config.json").read_text()))
    chosen = {"apply_rope_fusion": False, "gradient_accumulation_fusion": True}
    fields = vars(model.transformer_config(a, Sizes(), torch.bfloat16, chosen))
    fused = (
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
    )
    assert [fields[name] for name in fused] == [True, True, True, True, False]
    assert fields["moe_token_dispatcher_type"] == "alltoall" and fields["transformer_impl"] == "transformer_engine"
    assert (
        "gradient_accumulation_fusion" not in fields
    )  # of TransformerEngine's layers alone: Megatron-Core's want APEX


@pytest.mark.parametrize(
    ("windowed", "changes"),
    [
        ("mistral", {"sliding_window": 5}),
        ("mixtral", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5}),
    ],
)
def test_windows_are_computed_as_transformers_does(make_model, tmp_path, windowed, changes):
    """Windows shorter than the samples; without them the log-probs are others."""
    checkpoint = make_model(windowed, tmp_path / "model", **changes)
    batch, setup = make_batch(), Setup()
    right = yardstick(yardstick_model(checkpoint), batch, setup.temperature)[0].float()
    found = make(checkpoint, setup).log_probs(batch, "old")["log_probs"]
    torch.testing.assert_close(found, right.detach(), rtol=0, atol=2e-5)
    config = json.loads((checkpoint / "config.json").read_text())
    layers = {"layer_types": ["full_attention"] * config["num_hidden_layers"]} if "layer_types" in config else {}
    (checkpoint / "config.json").write_text(
        json.dumps({**config, "sliding_window": None, "use_sliding_window": False, **layers})
    )
    other = make(checkpoint, setup).log_probs(batch, "old")["log_probs"]
    assert (other - right).abs().max() > 1e-3
