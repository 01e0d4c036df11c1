"""Does this model, run as engine and trainer run it, say what the plain Transformers model says?

A family that was never tried may compute something of its own in a place where packed sequences or cached keys matter: positions that
are counted over a whole call, a cache that two attentions share, a recurrent state, a temperature that begins at some position. So
when a model is built, a few sequences are scored by the embedded backend and by ordinary forwards of the same module, one sequence per
call, and the log-probabilities are compared. One sequence is longer than the lengths at which the configuration says that something
changes. Both sides compute in float32, whatever the model is kept in: the rounding of BF16 would hide small errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.errors import CheckpointError
from miles_core.plugin.boundaries import boundaries
from miles_embedded.model.configuration import configuration, text_configuration
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.load import NAME, decoder_layers

log = logging.getLogger(__name__)

#: Lengths of the short sequences; of the long one at least, and behind a boundary.
SHORT, FEWEST, BEHIND = (17, 9), 64, 16
#: Multiplications of weights, and tokens, that the long sequence may cost: on a CPU, on a GPU.
_WORK, _MOST = {"cpu": 2e11, "cuda": 2e14}, {"cpu": 1088, "cuda": 4352}
#: Median and mean |difference| of log-probabilities, in nats, that FP32 explains. The mean allows for a router that tips over.
MEDIAN, MEAN = 1e-3, 0.03
#: Consecutive tokens whose median is judged.
_STRETCH = 16

#: Scores of sequences: log p of every token after the first, [len - 1] each.
Score = Callable[[list[list[int]]], list[np.ndarray]]


def check_scores(model: nn.Module, scores: Mapping[str, Score]) -> None:
    """Compare ways to score with plain forwards.

    Args:
        model: prepared by ``load_model``.
        scores: what happens -> a way to score, as in ``"packed sequences are scored"``. A way may score the first tokens only, or NaN
            for tokens that it does not score.

    Raises:
        CheckpointError: one differs by more than rounding, or the model cannot be run in this way, or not plainly.
    """
    name = type(model).__name__
    with in_float32(model):
        sequences = probe_sequences(model)
        try:
            with plain(model):
                expected = [_alone(model, sequence) for sequence in sequences]
        except Exception as error:
            raise CheckpointError(
                f"{name} could not be compared with its plain forward, which fails ({type(error).__name__}: {error}); use another "
                "engine and trainer, or --no-self-check if the model is known to be computed rightly"
            ) from error
        for what, score in scores.items():
            try:
                found = score(sequences)
            except Exception as error:
                raise CheckpointError(
                    f"{name} cannot be run by the embedded backend ({type(error).__name__}: {error}); use another engine and trainer"
                ) from error
            _judge(name, what, found, expected)


def _judge(name: str, what: str, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    gaps = [np.abs(f - e[: len(f)]) for f, e in zip(found, expected, strict=True)]
    gaps = [gap[~np.isnan(f)] for gap, f in zip(gaps, found, strict=True)]
    stretches = [np.median(s) for gap in gaps for s in np.array_split(gap, max(len(gap) // _STRETCH, 1)) if len(s)]
    median, mean = float(max(stretches)), float(np.concatenate(gaps).mean())
    if not (median <= MEDIAN and mean <= MEAN):
        raise CheckpointError(
            f"{name} is not computed rightly by the embedded backend: where {what}, log-probs differ from those of Transformers by "
            f"{max(median, mean):.2g} nats a token in float32; use another engine and trainer (--no-self-check runs it all the same)"
        )


def probe_sequences(model: nn.Module) -> list[list[int]]:
    """Random token ids that stand for text: one long sequence, which crosses the model's boundaries as far as that is cheap, and short
    ones."""
    config = text_configuration(model)
    device = next(model.parameters()).device.type
    parameters = sum(p.numel() for p in model.parameters())
    kind = "cpu" if device == "cpu" else "cuda"
    lengths = boundaries(configuration(model).to_dict())
    most = int(min(_MOST[kind], max(_WORK[kind] / parameters, FEWEST)))
    if "max_position_embeddings" not in lengths:  # else a longer sequence is what is to be compared
        most = min(most, int(getattr(config, "max_position_embeddings", None) or most))
    reached = [length + BEHIND for length in lengths.values() if length + BEHIND <= most]
    longest = min(max([FEWEST, *reached]), most)
    if beyond := {name: length for name, length in lengths.items() if length >= longest}:
        log.info("the self-check's %d tokens do not reach %s", longest, beyond)
    vocabulary: Any = model
    usual = torch.tensor(_usual_tokens(model, vocabulary.get_output_embeddings().weight.shape[0]))
    generator = torch.Generator().manual_seed(0)
    return [usual[torch.randint(len(usual), (n,), generator=generator)].tolist() for n in (longest, *SHORT)]


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """While this is open the model computes in float32: everything outside of its layers is converted, and each layer while it runs."""
    kept: dict[Tensor, Tensor] = {}

    def convert(modules: Iterator[nn.Module] | Sequence[nn.Module]) -> list[Tensor]:
        converted = []
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16) and tensor not in kept:
                    kept[tensor], tensor.data = tensor.data, tensor.data.float()
                    converted.append(tensor)
        return converted

    def restore(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.data = kept.pop(tensor)

    layers = list(decoder_layers(model))
    inside = {id(m) for layer in layers for m in layer.modules()}
    outside = convert([m for m in model.modules() if id(m) not in inside])
    running: dict[int, list[Tensor]] = {}
    hooks = []
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda m, _: running.update({id(m): convert(list(m.modules()))})))
        hooks.append(layer.register_forward_hook(lambda m, *_: restore(running.pop(id(m), [])), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for tensors in (*running.values(), outside):
            restore(tensors)


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """While this is open the model attends, and runs its experts, by Transformers' own functions."""
    named: Any = model
    named.set_attn_implementation("eager")
    named.set_experts_implementation("eager")
    try:
        yield
    finally:
        named.set_attn_implementation(NAME)
        named.set_experts_implementation(NAME)


def _usual_tokens(model: nn.Module, vocabulary: int) -> list[int]:
    """Ids that stand for text and not for an image, where a model has such."""
    given = [v for k, v in configuration(model).to_dict().items() if k.endswith(("_token_id", "_token_index"))]
    special = {token for v in given for token in (v if isinstance(v, list) else [v])}
    return [token for token in range(vocabulary) if token not in special]


@torch.no_grad()
def _alone(model: Any, sequence: list[int]) -> np.ndarray:
    """log p of every token after the first, [len - 1], by ordinary forwards as Transformers' generation makes them: where rotary
    frequencies change at a length, one sequence ends there (``longrope``), or each token beyond is fed behind cached ones (``dynamic``)."""
    ids = torch.tensor([sequence], device=next(model.parameters()).device)
    inputs, switch, limit = ids[:, :-1], rope_switch(model), _dynamic_limit(model)
    if switch and inputs.shape[1] > switch:
        short = model(input_ids=inputs[:, :switch], use_cache=False).logits
        logits = torch.cat([short, model(input_ids=inputs, use_cache=False).logits[:, switch:]], 1)
    elif limit and inputs.shape[1] > limit:
        _reset_frequencies(model)
        out = model(input_ids=inputs[:, :limit], use_cache=True)
        parts = [out.logits]
        for at in range(limit, inputs.shape[1]):
            out = model(input_ids=inputs[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
        _reset_frequencies(model)
        logits = torch.cat(parts, 1)
    else:
        logits = model(input_ids=inputs, use_cache=False).logits
    log_probs = logits[0].float().log_softmax(-1)
    found: np.ndarray = log_probs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    return found


def _reset_frequencies(model: nn.Module) -> None:
    """Begin a new sequence: Transformers keeps the frequencies that an earlier, longer one needed."""
    for module in model.modules():
        named: Any = module
        if hasattr(module, "original_inv_freq") and hasattr(module, "max_seq_len_cached"):
            named.inv_freq, named.max_seq_len_cached = named.original_inv_freq.clone(), named.original_max_seq_len


def _dynamic_limit(model: nn.Module) -> int:
    """The length beyond which a ``dynamic`` rotary embedding has other frequencies for each length; 0 for none."""
    return boundaries(configuration(model).to_dict()).get("max_position_embeddings", 0)
