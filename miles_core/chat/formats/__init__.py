"""Formats in which models write tool calls, one module per family of formats.

A ``Format`` reads the calls of an answer; ``FORMATS`` is the table of all. The format of a model is detected by rendering a call with its
chat template and reading it back (``miles_core.chat.template``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.chat.call import Answer
from miles_core.chat.formats import harmony, json_lists, json_tags, marked, pythonic, xml_tags

#: ``(text, parameters) -> Answer``; ``parameters`` maps a tool's name to its JSON schema of parameters. The text holds special tokens
#: and neither reasoning nor the final stop token (except for ``gpt_oss``, which separates its reasoning itself).
Parser = Callable[[str, Mapping[str, Mapping[str, Any]]], Answer]


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        parse: reads the calls of an answer.
        families: models that write it, for messages.
        stops: special tokens that end an answer with calls; requests stop at those that the tokenizer has.
        own_reasoning: whether ``parse`` separates the reasoning itself.
    """

    parse: Parser
    families: str
    stops: tuple[str, ...] = ()
    own_reasoning: bool = False


FORMATS: Mapping[str, Format] = {
    "hermes": Format(json_tags.parse, "Hermes 2 and 3, Qwen2.5, Qwen3"),
    "qwen_xml": Format(xml_tags.parse_qwen, "Qwen3-Coder, Qwen3.5 and later"),
    "glm": Format(xml_tags.parse_glm, "GLM-4.5 and later", stops=("<|observation|>",)),
    "mistral": Format(json_lists.parse_mistral, "Mistral, Mixtral, Devstral"),
    "deepseek": Format(marked.parse_deepseek, "DeepSeek-V3, R1 and V3.1"),
    "kimi": Format(marked.parse_kimi, "Kimi-K2"),
    "gpt_oss": Format(harmony.parse, "gpt-oss", stops=("<|call|>",), own_reasoning=True),
    "llama": Format(json_lists.parse_llama, "Llama 3.1, 3.2 and 3.3", stops=("<|eom_id|>",)),
    "pythonic": Format(pythonic.parse, "Llama 3.2 and 4 with calls in Python syntax"),
}
