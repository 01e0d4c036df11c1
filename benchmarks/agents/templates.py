"""What chat templates of many families do with earlier answers when a message follows, and how a conversation continues.

Reads every ``*.jinja`` file of a directory (TRL ships those of the families it supports) and examines it with a byte tokenizer whose special tokens
are those that the template writes. ``continued`` counts templates for which a tool's result or a user message is appended to the tokens of an
answer without a change.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.measure import finish, installed
from miles_core.data import Renderer

SPECIAL = re.compile(r"<[|｜][^<>\s'\"]{1,30}[|｜]>|</?think>|<\|?\w+\|?>")


def make_tokenizer(template: str) -> Any:
    """Make a tokenizer of bytes whose special tokens are those that ``template`` writes."""
    special = sorted(token for token in set(SPECIAL.findall(template)) if "|" in token or "｜" in token)
    symbols = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special, "<s>", "<|eos|>"])
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|eos|>", bos_token="<s>", additional_special_tokens=special
    )
    tokenizer.chat_template = template
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--templates", type=Path, required=True, help="directory with *.jinja files")
    parser.add_argument("--source", required=True, help="where they come from, for the result: package and version")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME-DATE.json")
    given = parser.parse_args()
    found = {}
    for path in sorted(given.templates.glob("*.jinja")):
        if not path.stem.endswith("_training"):  # TRL's own changes
            renderer = Renderer(make_tokenizer(path.read_text(encoding="utf-8")))
            found[path.stem] = {role: renderer.examine(role) for role in ("user", "tool")}
            print(path.stem, found[path.stem], flush=True)
    counts = {role: dict(Counter(effects[role] for effects in found.values())) for role in ("user", "tool")}
    result = {"source": given.source, "number": len(found), "counts": counts, "templates": found}
    finish("templates", result, given.save, lambda: installed("transformers", "jinja2"))


if __name__ == "__main__":
    main()
