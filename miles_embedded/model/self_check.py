"""Compare the model as engine and trainer run it with the plain Transformers model.

An untested family may contain computations for which packed sequences or cached keys matter: positions counted over a whole call, a
cache shared by two attentions, a recurrent state, a temperature that depends on the position. When a model is built, the embedded
backend therefore scores a few sequences, and the log-probabilities are compared with ordinary forwards of the same module, one sequence
per call. One sequence is longer than the lengths at which, according to the configuration, the computation changes. Both sides compute
in float32 for every model dtype, because BF16 rounding would hide small errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from miles_core.errors import CheckpointError
from miles_core.plugin.boundaries import boundaries
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.parts import configuration, decoder_layers, text_configuration

log = logging.getLogger(__name__)

#: Lengths of the short sequences; smallest length of the long sequence; its tokens after a boundary.
SHORT, FEWEST, BEHIND = (17, 9), 64, 16
#: Limits on the long sequence for a CPU and a GPU: multiplications by weights, and tokens.
_WORK, _MOST = {"cpu": 2e11, "cuda": 2e14}, {"cpu": 1088, "cuda": 4352}
#: Largest median and mean |difference| of log-probabilities in FP32, in nats. The mean allows for routers that choose another expert.
MEDIAN, MEAN = 1e-3, 0.03
#: Number of consecutive tokens over which the median is taken.
_STRETCH = 16

#: Draws of sequences that follow if the first one differs; the model is refused if one of them differs, too.
_FURTHER = (1, 2)

#: In place of the log-prob of a token that a function does not score; NaN would be a wrong result.
UNSCORED = np.float32(np.inf)
#: Scores sequences: returns log p of every token after the first, [len - 1] per sequence.
Score = Callable[[list[list[int]]], list[np.ndarray]]


def check_scores(model: nn.Module, scores: Mapping[str, Score]) -> None:
    """Compare scoring functions with plain forwards.

    Args:
        model: prepared by ``load_model``.
        scores: description -> scoring function, as in ``"packed sequences are scored"``. A function may score only the first tokens, and
            return ``UNSCORED`` for tokens that it does not score.

    Raises:
        CheckpointError: a function differs by more than rounding for two draws of sequences, or a forward of either side fails.
    """
    name = type(model).__name__
    with in_float32(model):
        fault = _compare(model, scores, 0)
        if fault:
            # A router's tie that rounding breaks differently changes the scores of one draw; a wrong computation also those of others.
            faults = (_compare(model, scores, draw) for draw in _FURTHER)
            fault = next(filter(None, faults), "")
        if fault:
            raise CheckpointError(
                f"{name} is not computed correctly by the embedded backend: {fault}; use another engine and trainer (--no-self-check "
                "skips this check)"
            )


def _compare(model: nn.Module, scores: Mapping[str, Score], draw: int) -> str:
    """Describe the first function whose scores of a draw of sequences differ; "" if there is none."""
    name, sequences = type(model).__name__, probe_sequences(model, draw)
    try:
        with plain_forwards(model):
            expected = [_score_plain(model, sequence) for sequence in sequences]
    except (MemoryError, torch.OutOfMemoryError):
        raise  # says something about the machine, not about the model
    except Exception as error:
        raise CheckpointError(
            f"{name} could not be compared with its plain forward, which fails ({type(error).__name__}: {error}); use another "
            "engine and trainer, or --no-self-check if the model is known to be computed correctly"
        ) from error
    for what, score in scores.items():
        try:
            found = score(sequences)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{name} cannot be run by the embedded backend ({type(error).__name__}: {error}); use another engine and trainer"
            ) from error
        if fault := _judge(what, found, expected):
            return fault
    return ""


def _judge(what: str, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> str:
    """Describe a difference that is larger than rounding; "" if there is none."""
    gaps = [np.abs(f - e[: len(f)])[f != UNSCORED] for f, e in zip(found, expected, strict=True)]
    stretches = [np.median(s) for gap in gaps for s in np.array_split(gap, max(len(gap) // _STRETCH, 1)) if len(s)]
    median, mean = float(np.max(stretches)), float(np.concatenate(gaps).mean())  # NaN if a log-prob is
    if median <= MEDIAN and mean <= MEAN:
        return ""
    return f"where {what}, log-probs differ from those of Transformers by {np.maximum(median, mean):.2g} nats per token in float32"


def probe_sequences(model: nn.Module, draw: int = 0) -> list[list[int]]:
    """Return sequences of random token ids: a long one, which crosses the model's length boundaries as far as that is cheap, and short
    ones. ``draw`` chooses the tokens."""
    config = text_configuration(model)
    device = next(model.parameters()).device.type
    parameters = sum(p.numel() for p in model.parameters())
    kind = "cpu" if device == "cpu" else "cuda"
    lengths = boundaries(configuration(model).to_dict())
    most = int(min(_MOST[kind], max(_WORK[kind] / parameters, FEWEST)))
    if "max_position_embeddings" not in lengths:  # otherwise a longer sequence is part of the comparison
        most = min(most, int(getattr(config, "max_position_embeddings", None) or most))
    reached = [length + BEHIND for length in lengths.values() if length + BEHIND <= most]
    longest = min(max([FEWEST, *reached]), most)
    if beyond := {name: length for name, length in lengths.items() if length >= longest}:
        log.info("the self-check's %d tokens do not reach %s", longest, beyond)
    vocabulary: Any = model
    usual = torch.tensor(_usual_tokens(model, vocabulary.get_output_embeddings().weight.shape[0]))
    generator = torch.Generator().manual_seed(draw)
    return [usual[torch.randint(len(usual), (n,), generator=generator)].tolist() for n in (longest, *SHORT)]


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Run the model in float32: convert tensors outside its layers for the whole context, and those of a layer while it runs."""
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
def plain_forwards(model: nn.Module) -> Iterator[None]:
    """Run attention and experts with Transformers' own functions inside this context."""
    named: Any = model
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values()
    before = [dict(vars(config)) for config in configs]
    named.set_attn_implementation("eager")
    named.set_experts_implementation("eager")
    try:
        yield
    finally:
        for config, values in zip(configs, before, strict=True):  # Transformers 5.12 cannot set back an attached draft
            vars(config).clear()
            vars(config).update(values)


def _usual_tokens(model: nn.Module, vocabulary: int) -> list[int]:
    """Return the ids of text tokens, without placeholders for other modalities."""
    given = [v for k, v in configuration(model).to_dict().items() if k.endswith(("_token_id", "_token_index"))]
    special = {token for v in given for token in (v if isinstance(v, list) else [v])}
    return [token for token in range(vocabulary) if token not in special]


@torch.no_grad()
def _score_plain(model: Any, sequence: list[int]) -> np.ndarray:
    """Return log p of every token after the first, [len - 1], by ordinary forwards as in Transformers' generation.

    Where rotary frequencies change at a length, the beginning is computed as a separate sequence (``longrope``), or each later token is
    fed after cached ones (``dynamic``).
    """
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
    """Reset frequencies that Transformers kept from an earlier, longer sequence."""
    for module in model.modules():
        named: Any = module
        if hasattr(module, "original_inv_freq") and hasattr(module, "max_seq_len_cached"):
            named.inv_freq, named.max_seq_len_cached = named.original_inv_freq.clone(), named.original_max_seq_len


def _dynamic_limit(model: nn.Module) -> int:
    """Return the length beyond which a ``dynamic`` rotary embedding changes its frequencies with every token; 0 if there is none."""
    return boundaries(configuration(model).to_dict()).get("max_position_embeddings", 0)
