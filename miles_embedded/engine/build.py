"""The embedded engine from a run's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from miles_core.errors import CheckpointError
from miles_core.precision.product import Products
from miles_core.sync.precision import make_codec
from miles_embedded.engine.decoder import PlainDecoder
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.self_check import self_check
from miles_embedded.engine.settings import Settings
from miles_embedded.model.configuration import head
from miles_embedded.model.growing_rope import rope_switch
from miles_embedded.model.load import build_model

log = logging.getLogger(__name__)


def make_engine(run: Any, policy: Any) -> EmbeddedEngine:
    """The provider of ``--engine embedded``. The decoder is the first that an active plugin provides, else core's."""
    config = run.config_of(policy)
    model = build_model(run, policy, "rollout")
    if config.model.self_check:
        self_check(model)
    settings = Settings(
        detokenize=detokenizer(run.tokenizer),
        eos=end_tokens(model, run.tokenizer),
        seed=config.train.seed,
        max_running_requests=config.rollout.max_running_requests,
        max_context=config.rollout.max_context_len or 0,
        codec=make_codec(run, policy),
        codec_of=lambda precision: make_codec(run, policy, precision),
        products=Products.from_config(config),
        kv_cache_dtype="" if config.rollout.kv_cache_dtype == "auto" else config.rollout.kv_cache_dtype,
        cuda_graphs=not config.embedded.disable_cuda_graph,
    )
    engine = EmbeddedEngine(model, settings)
    name = run.hooks.provided("decoder")[0]
    engine.decoder = run.hooks.make("decoder", name, run=run, policy=policy, engine=engine)
    if not isinstance(engine.decoder, PlainDecoder):
        refuse_growing(model, engine.max_context)
    return engine


def refuse_growing(model: nn.Module, longest: int) -> None:
    """CheckpointError where a decoder that feeds several tokens at once could feed some on either side of the length at which
    rotary frequencies change."""
    switch = rope_switch(model)
    if switch and longest > switch:
        raise CheckpointError(
            f"--rollout-max-context-len {longest}: {type(model).__name__} has other rotary frequencies beyond {switch} tokens "
            f"(longrope in config.json), and a drafting decoder feeds tokens on both sides at once; give {switch} or less, or run "
            "without drafts"
        )


def detokenizer(tokenizer: Any) -> Callable[[list[int]], str]:
    """Token ids to text without special tokens; straight to the Rust tokenizer where nothing else would be done."""
    if tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        backend = tokenizer.backend_tokenizer
        return lambda tokens: backend.decode(tokens, skip_special_tokens=True)
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def end_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Ids that end a response: the generation configuration's and the tokenizer's."""
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(declared) if isinstance(declared, list) else {declared}
    ends = {i for i in (*ids, tokenizer.eos_token_id) if i is not None}
    known = head(model).weight.shape[0]
    if beyond := sorted(i for i in ends if not 0 <= i < known):
        log.warning(
            "eos_token_id %s of generation_config.json or config.json is no token of the model, which has %d; responses end with %s",
            ", ".join(map(str, beyond)),
            known,
            ", ".join(map(str, sorted(ends - set(beyond)))),
        )
    return sorted(ends - set(beyond))
