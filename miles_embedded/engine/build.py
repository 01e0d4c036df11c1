"""Build the embedded engine from the configuration of a run."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from miles_core.contracts.run import StateKey
from miles_core.errors import CheckpointError
from miles_core.precision.products import Products
from miles_core.sync.push import make_codec
from miles_embedded.engine.decoder import AsyncSteps, PlainDecoder
from miles_embedded.engine.detokenizer import Detokenizer
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.self_check import self_check
from miles_embedded.engine.settings import Settings
from miles_embedded.engine.shared import SharedBatch, SharedEngine
from miles_embedded.model.free_memory import check_free_memory
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.image_processor import find_processor
from miles_embedded.model.load import build_model
from miles_embedded.model.parts import head
from miles_embedded.model.variants import Variant, find_variant

log = logging.getLogger(__name__)


#: (key of the variants, settings) -> the batch of the policies whose models are these variants.
BATCHES = StateKey[dict[tuple[object, ...], SharedBatch]]()


def make_engine(run: Any, policy: Any) -> EmbeddedEngine | SharedEngine:
    """Make the engine of ``--engine embedded``, with the decoder of the first active plugin that provides one, otherwise ``plain``. Policies
    whose models are variants of one model share a batch."""
    config = run.config_of(policy)
    check_free_memory(run, config, "engine")
    model = build_model(run, policy, "rollout")
    if config.model.self_check:
        self_check(model)
    settings = Settings(
        detokenize=Detokenizer(run.tokenizer),
        eos=end_tokens(model, run.tokenizer),
        seed=config.train.seed,
        max_running_requests=config.rollout.max_running_requests,
        max_context=config.rollout.max_context_len or 0,
        codec=make_codec(run, policy),
        codec_of=lambda precision: make_codec(run, policy, precision),
        products=Products.from_config(config),
        kv_cache_dtype="" if config.rollout.kv_cache_dtype == "auto" else config.rollout.kv_cache_dtype,
        processor=find_processor(run, policy),
        cuda_graphs=not config.embedded.disable_cuda_graph,
    )
    if (variant := find_variant(model)) is not None:
        return SharedEngine(model, settings, _find_batch(run, policy, settings, variant))
    engine = EmbeddedEngine(model, settings)
    name = run.hooks.find_provided("decoder")[0]
    engine.decoder = run.hooks.make("decoder", name, run=run, policy=policy, engine=engine)
    if not isinstance(engine.decoder, PlainDecoder):
        check_rope_switch(model, engine.max_context)
        if engine.async_steps.used and isinstance(engine.async_steps, AsyncSteps):
            log.info("the decoder %s has no steps in static buffers: it decodes without CUDA graphs", name)
    return engine


def _find_batch(run: Any, policy: Any, settings: Settings, variant: Variant) -> SharedBatch:
    """Return the batch of a variant, made for the first policy."""
    alike = ("seed", "max_running_requests", "max_context", "kv_cache_dtype", "cuda_graphs")
    key = (variant.key, *(getattr(settings, name) for name in alike))
    batches = run.state.setdefault(BATCHES, {})
    if key not in batches:
        batches[key] = SharedBatch(build_model(run, policy, "rollout"), settings, variant)
    found: SharedBatch = batches[key]
    return found


def check_rope_switch(model: nn.Module, longest: int) -> None:
    """Check that a decoder which feeds several tokens per step cannot cross the length at which rotary frequencies change.

    Raises:
        CheckpointError: sequences of ``longest`` tokens exceed that length.
    """
    switch = rope_switch(model)
    if switch and longest > switch:
        raise CheckpointError(
            f"--rollout-max-context-len {longest}: {type(model).__name__} changes its rotary frequencies beyond {switch} tokens "
            f"(longrope in config.json), and a drafting decoder would feed tokens on both sides in one step; set it to {switch} or "
            "less, or run without drafts"
        )


def end_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the ids that end a response, from the generation configuration and the tokenizer. Drops and logs invalid ids."""
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(declared) if isinstance(declared, list) else {declared}
    ends = {i for i in (*ids, tokenizer.eos_token_id) if i is not None}
    known = head(model).weight.shape[0]
    if beyond := sorted(i for i in ends if not 0 <= i < known):
        log.warning(
            "eos_token_id %s of generation_config.json or config.json is outside the model's vocabulary of %d; responses end with %s",
            ", ".join(map(str, beyond)),
            known,
            ", ".join(map(str, sorted(ends - set(beyond)))),
        )
    return sorted(ends - set(beyond))
