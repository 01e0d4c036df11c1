"""Each planted fault is found under its own name."""

import pytest
import torch

from miles_core.contracts.transport import SyncReport
from miles_core.errors import MismatchError
from miles_core.mismatch import budget as b
from miles_core.mismatch.probe import probe, probe_prompts
from miles_core.precision.products import Products
from miles_embedded.engine.engine import EmbeddedEngine
from miles_fp8.format import Fp8
from miles_testing.doubles.product import ExactProduct
from miles_tools.verify.verify import verify

NOISE = """
import torch
from miles_core.plugin.marker import hookimpl
from miles_core.plugin.manifest import Plugin

plugin = Plugin("noise", "noise on the engine's activations", "0", "~=0.1", hooks={"": "Hooks"})


def noisy(module, args):
    generator = torch.Generator().manual_seed(0)
    return (args[0] * (1 + 0.05 * torch.randn(args[0].shape[-1], generator=generator)), *args[1:])


class Hooks:
    @hookimpl
    def on_model(self, model, role):
        if role == "rollout":
            for name, module in model.named_modules():
                if name.endswith("o_proj"):
                    module.register_forward_pre_hook(noisy)
"""

ROUTES = """
import torch
from miles_core.plugin.marker import hookimpl
from miles_core.plugin.manifest import Plugin

plugin = Plugin("detour", "sends every third token to the next expert", "0", "~=0.1", hooks={"": "Hooks"}, before=("r3",))


class Hooks:
    @hookimpl
    def on_model(self, model, role):
        if role != "rollout":
            return
        for block in (m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate")):
            seen = {}

            def keep(gate, args, out, seen=seen):
                seen["logits"] = out[0] if isinstance(out, tuple) else out

            def detour(experts, args, seen=seen):
                hidden, index, weights = args
                logits = seen["logits"].reshape(len(index), -1)
                away = (hidden.sum(-1, keepdim=True) * 100).long() % 3 == 0
                index = torch.where(away, (index + 1) % logits.shape[-1], index)
                weights = logits.softmax(-1, dtype=torch.float32).gather(-1, index)
                return hidden, index, (weights / weights.sum(-1, keepdim=True)).to(args[2].dtype)

            block.gate.register_forward_hook(keep)
            block.experts.register_forward_pre_hook(detour)
"""


async def measured(run, parts):
    samples = await probe(run, parts, probe_prompts(run), support=True)
    return await b.budget(run, parts, samples)


def shares(found):
    assert sum(c.share for c in found.causes) == pytest.approx(1 if found.total.mean_abs else 0)
    assert sum(c.kl for c in found.causes) == pytest.approx(found.total.kl_k3)
    return {c.name: c.share for c in found.causes if not c.why}


def perturb(learner):
    """Move the trainer's weights on, as an optimiser step would."""
    with torch.no_grad():
        for parameter in learner.rank.trainer.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def test_without_a_fault_only_rounding_is_left(with_parts):
    found = with_parts(measured, family="qwen3")
    assert found.total.mean_abs < 1e-5
    assert set(shares(found)) == {b.STALE, b.ACTIVATIONS, b.KERNELS}


def test_weights_in_a_number_format(with_parts):
    found = with_parts(measured, ["fp8"], family="qwen3", rollout_precision="fp8")
    part = shares(found)
    assert {c.name for c in found.ordered()[:2]} == {b.WEIGHTS, b.ACTIVATIONS}  # fp8 rounds both
    assert part[b.WEIGHTS] + part[b.ACTIVATIONS] == pytest.approx(1, abs=1e-3)
    assert found.total.mean_abs > 0.01


def test_one_format_on_both_sides_costs_nothing(with_parts):
    found = with_parts(measured, ["fp8"], family="qwen3", rollout_precision="fp8", train_precision="fp8")
    assert found.total.mean_abs < 1e-5


class Louder(ExactProduct):
    """A native product that is off by a twentieth, and says so."""

    eps = 0.1

    def __call__(self, x, weight, bias=None):
        return 1.05 * super().__call__(x, weight, bias)


@pytest.mark.parametrize(
    ("train", "wanted", "family", "equal"),
    [
        ("bf16", "native", "qwen3", False),
        ("fp8", "native", "qwen3", True),
        ("fp8", "auto", "qwen3", True),
        ("fp8", "auto", "qwen3_moe", False),
    ],
)
def test_the_products_of_the_engine(with_parts, monkeypatch, train, wanted, family, equal):
    monkeypatch.setattr(Fp8, "product", lambda self, device, dtype: Louder(self, device, dtype))
    monkeypatch.setattr(Products, "from_config", lambda config: Products(wanted))
    found = with_parts(measured, ["fp8"], family=family, rollout_precision="fp8", train_precision=train)
    if equal:  # both sides multiply alike: no cause
        assert found.total.mean_abs < 1e-3 and b.PRODUCTS not in shares(found)
        return
    by_name = {c.name: c for c in found.causes}
    assert by_name[b.PRODUCTS].abs_delta > 0.01 and by_name[b.KERNELS].abs_delta < 1e-4
    assert list(by_name).index(b.PRODUCTS) == list(by_name).index(b.ACTIVATIONS) + 1


def test_routes_that_differ(with_parts, tmp_path):
    (tmp_path / "detour.py").write_text(ROUTES)
    found = with_parts(measured, [str(tmp_path / "detour.py"), "r3"])
    first = found.ordered()[0]
    assert (first.name, first.corrected) == (b.ROUTING, True)
    assert first.share == pytest.approx(1, abs=1e-3)
    assert found.remaining.mean_abs < 1e-5 < 0.01 < found.total.mean_abs


def test_stale_weights(with_parts):
    async def stale(run, parts):
        perturb(parts.learner)
        return await measured(run, parts)

    found = with_parts(stale)
    assert shares(found)[b.STALE] == pytest.approx(1, abs=1e-3)
    assert [c.name for c in found.causes if c.why] == [b.ROUTING]


def test_stale_weights_in_a_number_format_are_two_causes(with_parts):
    async def stale(run, parts):
        perturb(parts.learner)
        return await measured(run, parts)

    found = with_parts(stale, ["fp8"], family="qwen3", rollout_precision="fp8")
    assert min(c.abs_delta for c in found.causes if c.name in (b.STALE, b.WEIGHTS)) > 0.01
    part = shares(found)
    assert part[b.STALE] + part[b.WEIGHTS] + part[b.ACTIVATIONS] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_rounded_cache(with_parts, dtype):
    found = with_parts(measured, family="deepseek_v3", kv_cache_dtype=dtype)
    assert shares(found)[b.CACHE] == pytest.approx(1, abs=0.02)
    assert found.total.mean_abs > 1e-4


def test_a_truncated_sampler_without_its_support(with_parts):
    found = with_parts(measured, rollout_top_k=3, full_vocab_logprobs=True)
    first = found.ordered()[0]
    assert (first.name, first.corrected) == (b.SAMPLING_SUPPORT.label, False)
    assert first.share == pytest.approx(1, abs=1e-3)
    assert found.remaining.mean_abs == pytest.approx(found.total.mean_abs)


def test_a_truncated_sampler_with_its_support_is_corrected(with_parts):
    found = with_parts(measured, rollout_top_k=3)
    assert found.ordered()[0].corrected
    assert found.remaining.mean_abs < 1e-5 < found.total.mean_abs


def test_noise_on_activations(with_parts, tmp_path):
    (tmp_path / "noise.py").write_text(NOISE)
    found = with_parts(measured, [str(tmp_path / "noise.py")], family="qwen3")
    assert shares(found)[b.ACTIVATIONS] == pytest.approx(1, abs=1e-3)


def test_measuring_leaves_the_trainer_as_it_was(with_parts):
    async def before_and_after(run, parts):
        model = parts.learner.rank.trainer.model
        before = {n: t.clone() for n, t in model.state_dict().items()}
        await measured(run, parts)
        return all(torch.equal(t, before[n]) for n, t in model.state_dict().items())

    assert with_parts(before_and_after, ["fp8"], rollout_precision="fp8", kv_cache_dtype="bfloat16")


class Elsewhere:
    """An engine as it looks from another process: no model to look into."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.generate, self.update_weights, self.stop = engine.generate, engine.update_weights, engine.stop
        self.capabilities, self.kv_cache_dtype = engine.capabilities, engine.kv_cache_dtype


def test_an_engine_elsewhere_is_emulated(with_parts):
    async def elsewhere(run, parts):
        parts.engine = Elsewhere(parts.engine)
        return await measured(run, parts)

    found = with_parts(elsewhere, ["fp8"], family="qwen3", rollout_precision="fp8", kv_cache_dtype="float8_e5m2")
    part = shares(found)
    assert min(c.abs_delta for c in found.causes if c.name in (b.WEIGHTS, b.ACTIVATIONS, b.CACHE)) > 0.02
    assert part[b.UNEXPLAINED] == pytest.approx(0, abs=0.02)
    assert b.KERNELS not in part
    why = next(c.why for c in found.causes if c.name == b.STALE)
    assert why == "the engine runs in another process, no weights of an earlier version were kept"


async def next_version(parts, learner, arrives):
    """An optimiser step and a sync that the engine acknowledges; the learner keeps the weights before it."""
    await learner.take_snapshot(parts.policy.version)
    perturb(learner)
    parts.policy.version += 1
    if arrives:
        await learner.push(parts.policy.version)


def test_staleness_of_an_engine_elsewhere_is_told_from_the_weights_before(with_parts):
    """The samples claim the current version each time; whether they are believed depends on what the engine sampled from."""

    async def body(run, parts):
        parts.engine = Elsewhere(parts.engine)
        found = []
        for arrives in (True, False):
            await next_version(parts, parts.learner, arrives)
            samples = await probe(run, parts, probe_prompts(run), support=True)
            for sample in samples:
                sample.weight_versions = [(0, parts.policy.version)]
            found.append(await b.budget(run, parts, samples))
        return found

    sound, stale = with_parts(body)
    assert sound.total.mean_abs < 1e-5 and shares(sound)[b.STALE] == 0
    assert stale.total.mean_abs > 0.01 and shares(stale)[b.STALE] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("arrives", [True, False])
def test_staleness_beside_a_number_format(with_parts, arrives):
    async def body(run, parts):
        parts.engine = Elsewhere(parts.engine)
        await next_version(parts, parts.learner, arrives)
        samples = await probe(run, parts, probe_prompts(run), support=True)
        for sample in samples:
            sample.weight_versions = []  # an engine that stamps nothing
        return await b.budget(run, parts, samples)

    found = with_parts(body, ["fp8"], family="qwen3", rollout_precision="fp8")
    part = {c.name: c.abs_delta for c in found.causes}
    assert part[b.WEIGHTS] > 0.005 and part[b.ACTIVATIONS] > 0.005
    assert part[b.STALE] == 0 if arrives else part[b.STALE] > 0.05
    assert abs(shares(found)[b.UNEXPLAINED]) < 0.02


def test_samples_of_some_workers_are_older(with_parts):
    """One worker missed the update, whether or not it stamps its tokens so; an engine of an unknown age is not judged."""

    async def body(run, parts):
        old = await probe(run, parts, probe_prompts(run), support=True)
        await next_version(parts, parts.learner, arrives=True)
        new = await probe(run, parts, probe_prompts(run), support=True)
        parts.engine = Elsewhere(parts.engine)
        mixed = [*old[::2], *new[1::2]]
        stamped = await b.budget(run, parts, mixed)
        for sample in mixed:
            sample.weight_versions = [(0, parts.policy.version)]
        claimed = await b.budget(run, parts, mixed)
        mixed[0].weight_versions = [(0, -7)]
        return stamped, claimed, await b.budget(run, parts, mixed)

    stamped, claimed, unknown = with_parts(body)
    assert shares(stamped)[b.STALE] == pytest.approx(1, abs=1e-3)
    assert shares(claimed)[b.STALE] == pytest.approx(1, abs=1e-3)
    why = next(c.why for c in unknown.causes if c.name == b.STALE)
    assert "the weights kept are version 0's, and the samples are of version -7" in why


DROPS = """
from miles_embedded import plugin as EMBEDDED
from miles_core.plugin.manifest import Plugin
from miles_embedded.testing.process_engine import ProcessEngine

has = tuple(c for c in EMBEDDED.capabilities["engine"] if c not in ("score", "weight_checksums"))  # else these would give it away
plugin = Plugin(
    "drops", "an engine in another process that drops an update", "0", "~=0.1",
    provides={"engine": {"drops": "make"}}, capabilities={"engine": has},
)


class Drops(ProcessEngine):
    capabilities = frozenset(has)

    async def update_weights(self, units, version):
        if version == 2:  # acknowledged, and stamped on its tokens by nobody
            list(units)
            self._version = version
        else:
            await super().update_weights(units, version)

    async def generate(self, request):
        response = await super().generate(request)
        response.weight_versions = [(0, self._version)]
        return response


def make(run):
    return Drops(run.config.model.hf_checkpoint)
"""


def test_a_run_names_staleness_of_an_engine_in_another_process(toy_run, tmp_path):
    """Sound after versions 0 and 1; the update to version 2 is lost. A process starts in some seconds."""
    (tmp_path / "drops.py").write_text(DROPS)
    with pytest.raises(MismatchError) as stopped:
        toy_run(
            [str(tmp_path / "drops.py")],
            engine="drops",
            lr=1e-2,
            steps=3,
            verify_logprobs=True,
            verify_logprobs_tolerance=1e-3,
        )
    assert "at weight version 2" in str(stopped.value) and "by cause: staleness 100%" in str(stopped.value)


def test_verify_holds_a_loaded_run_against_the_weights_the_engine_started_with(with_parts):
    """``miles verify --load --budget`` whose one sync is lost."""

    async def body(run, parts):
        learner, parts.engine = parts.learner, Elsewhere(parts.engine)
        parts.engine.version, parts.engine.score = 0, None
        parts.engine.capabilities -= {"score"}

        async def load(directory):
            perturb(learner)

        async def lost(version):
            return SyncReport(version, 0, 0, 0.0)

        learner.load, learner.push = load, lost
        return (await verify(run, [parts], run.directory, with_budget=True))[0].budget

    assert shares(with_parts(body))[b.STALE] == pytest.approx(1, abs=1e-3)
