"""Opening a file of prompts as the options say."""

from __future__ import annotations

import logging
from typing import Any

from miles_core.config.config import Config
from miles_core.data.prompts import Prompts, check_lengths, drop_long
from miles_core.data.template import PromptTemplate
from miles_core.errors import ConfigError

log = logging.getLogger(__name__)


def prompt_source(config: Config, render: PromptTemplate, paths: Any, flag: str) -> Prompts:
    """The rows of ``paths``, checked against the context length; ``flag`` is what names them, for messages."""
    data, options = config.data, config.rollout
    if not paths:
        raise ConfigError(f"no prompts: give {flag} FILE (JSONL or parquet)")
    source = Prompts(
        paths,
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        shuffle=data.shuffle,
        seed=config.train.seed,
    )
    if options.max_prompt_len:
        dropped = drop_long(source, render, options.max_prompt_len)
        if dropped:
            log.info("%s: %d prompts are longer than --rollout-max-prompt-len and left out", flag, dropped)
    if options.max_context_len:
        check_lengths(source, render, options.max_context_len - 1, "--rollout-max-context-len")
    return source
