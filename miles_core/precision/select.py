"""Choosing the number format of each side of a run, from its options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from miles_core.checkpoint.hf_files import CONFIG, CheckpointFiles, read_json
from miles_core.errors import ConfigError
from miles_core.mismatch.parity import SideParity, check, real_layer
from miles_core.plugin.detect import model_facts
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format
from miles_core.precision.fused_experts import Family
from miles_core.precision.product import Products
from miles_core.precision.schedule import PLAIN, precisions
from miles_core.precision.selector import Keep, Selector

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.config.groups import Precision
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.policy import Policy
    from miles_core.contracts.trainer import Trainer
    from miles_core.run.run import Run
    from miles_embedded.quantized.weights import FakeQuantizer


def make_codec(run: Run, policy: Policy | None = None, precision: str | None = None) -> Codec:
    """The codec of the rollout: what a weight sync sends and the engine decodes.

    Args:
        run: with the options.
        policy: whose model it is; the run's only one by default.
        precision: a format's name or ``bf16``; by default what the rollout starts with.
    """
    return _codec(run, policy, precision or precisions(run.config, 0).rollout)


class TrainedPrecision:
    """The models of the embedded trainer (the policy and its reference): all compute in ``train.precision``, or plainly
    during the warm-up."""

    def __init__(self, run: Run, policy: Policy | None = None) -> None:
        self.codec = _codec(run, policy, run.config.train.precision)
        self.products = Products.from_config(run.config)
        self.current = precisions(run.config, 0).train
        self._models: list[FakeQuantizer] = []

    def add(self, model: nn.Module) -> FakeQuantizer | None:
        """Take a model in, when every other hook has seen it; None when it stays as it is for the whole run."""
        if self.codec.format is None:
            return None
        from miles_embedded.quantized.weights import install  # brings Transformers, which miles convert does without

        quantizer = install(model, self.codec, self.products.of(self.codec.format, model))
        quantizer.enabled = self.current != PLAIN
        self._models.append(quantizer)
        return quantizer

    def switch(self, precision: str) -> None:
        """From the next pass on compute in ``precision``: ``train.precision`` or ``bf16``."""
        mine = PLAIN if self.codec.format is None else self.codec.format.name
        if precision not in (PLAIN, mine):
            raise ValueError(f"this trainer was built for {mine}, not for {precision}")
        self.current = precision
        for quantizer in self._models:
            quantizer.enabled = precision != PLAIN


def fake_quantize(run: Run, model: nn.Module, policy: Policy | None = None) -> FakeQuantizer | None:
    """One model of a trainer in ``train.precision``; see ``TrainedPrecision``."""
    return TrainedPrecision(run, policy).add(model)


def codec_for(format: type[Format], config: Config, checkpoint: str | None = None) -> Codec:
    """The codec of a number format with the options of ``config``: one rule for runs and for ``miles convert``.

    Args:
        format: the number format.
        config: its own options, and core's of precision.
        checkpoint: the model's, whose ``config.json`` says how many layers there are and how experts are joined.

    Raises:
        ConfigError: a layer range that does not fit the model.
    """
    made = format.from_config(config)
    keep = kept(config.precision, checkpoint)
    codec = Codec(made, Selector(made.skip, made.skip_origin, made.only, made.only_origin, keep))
    if checkpoint and (Path(checkpoint) / CONFIG).is_file():
        family = Family.of(read_json(Path(checkpoint) / CONFIG))
        entries = CheckpointFiles(checkpoint, "--hf-checkpoint").entries.values() if family.layout else ()
        codec.settle({e.name: e.shape for e in entries if e.dtype.is_floating_point}, family)
    return codec


def kept(options: Precision, checkpoint: str | None) -> tuple[Keep, ...]:
    """What core's options leave alone; ``checkpoint`` and errors as for ``codec_for``."""
    found = []
    if options.extra_high_precision_layers:
        found.append(Keep("--extra-high-precision-layers-hf", tuple(options.extra_high_precision_layers)))
    start, end = options.num_layers_at_start_in_bf16, options.num_layers_at_end_in_bf16
    if not start and not end:
        return tuple(found)
    layers = next(fact.value for fact in model_facts(checkpoint) if fact.name == "model.layers")
    if layers is None:
        raise ConfigError(
            f"--num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 {end} count decoder layers, but "
            f"config.json of {checkpoint} does not say how many there are; use --extra-high-precision-layers-hf"
        )
    if start + end >= layers:
        raise ConfigError(
            f"--num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 {end} leave none of the model's "
            f"{layers} layers to quantise; give smaller numbers, or use bf16"
        )
    if start:
        found.append(Keep("--num-layers-at-start-in-bf16", layers=range(start)))
    if end:
        found.append(Keep("--num-layers-at-end-in-bf16", layers=range(layers - end, layers)))
    return tuple(found)


def check_parity(run: Run, policy: Policy, trainer: Trainer, engine: Engine) -> list[SideParity]:
    """Measure how both sides quantise, before anything is trained; see ``precision.parity``. Sides in bf16 are left out.

    Raises:
        MilesError: a side declares nothing, or is worse than it declares.
    """
    sides = (
        (f"engine {run.config.run.engine}", run.config.rollout.precision, engine.quantizer),
        (f"trainer {run.config.run.trainer}", run.config.train.precision, trainer.quantizer),
    )
    real: dict[str, Tensor] | None = None
    found = []
    for backend, precision, quantizer in sides:
        codec = _codec(run, policy, precision)
        if codec.format is not None:
            real = real_layer(trainer.units(), codec) if real is None else real
            found.append(check(backend, codec.format, quantizer(codec.format), real))
    return found


def _codec(run: Run, policy: Policy | None, precision: str) -> Codec:
    if precision == PLAIN:
        return Codec()
    checkpoint = (policy.hf_checkpoint if policy else "") or run.config.model.hf_checkpoint
    return codec_for(run.hooks.format(precision), run.config, checkpoint)
