"""Tokens per second of whole rollouts with drafts and without, in turns, on the embedded engine as a run has it: on a GPU, steps with drafts
and steps without them are CUDA graphs. A side whose name ends with ``-launched`` launches every operation from Python.

The model is a random dense one that learns a small synthetic language first, and its MTP layer with it (``drafting_model.py``). Every request
gets ``--tokens`` tokens at temperature 1. The first turn of each side, which records graphs, is not counted; the second ``plain`` shows the
noise. ``tokens_per_step`` is the number that a step with K drafts emits per row. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from benchmarks.engine.drafting_model import drafting_model, pretrained
from benchmarks.engine.embedded_rollout import in_turns
from benchmarks.engine.languages import Language
from benchmarks.measure import finish, installed, options
from miles_core.engine import Request, Sampling
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_speculative.async_rounds import use_rounds
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.lookahead import Auto, Lookahead
from miles_speculative.tree import TreeDecoder

#: Sides without drafts; what two of them differ by is the noise of the others' numbers.
PLAIN, AGAIN = "plain", "plain again"


def main() -> None:
    parser = options(__doc__)
    for name, default in (
        ("layers", 16),
        ("hidden", 1536),
        ("vocab", 32000),
        ("tokens", 128),
        ("pretrain", 150),
        ("train-rows", 32),
        ("turns", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--sides",
        nargs="+",
        default=["2", "4", "auto", "2-launched", "plain-launched"],
        help="K, auto or plain; K-launched and plain-launched do not use CUDA graphs",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256], help="requests in flight")
    parser.add_argument("--state", help="file that keeps the model after its pre-training")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--draft-lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--checkpoint", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model, head = drafting_model(given)
    language = Language(given.vocab, seed=1)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else given.device,
        "parameters": sum(p.numel() for p in model.parameters()),
        "pretrain": pretrained(model, head, language, given),
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    for rows in given.batches:
        engines = {side: make_engine(model, head, side) for side in (PLAIN, AGAIN, *given.sides)}
        prompts = [list(map(int, prompt)) for prompt in language.batch(rows, 16)]
        asked = [Request(p, Sampling(given.tokens, ignore_eos=True), key=i) for i, p in enumerate(prompts)]
        found = in_turns(engines, asked, given.turns)
        for side, value in found.items():
            value |= steps_of(engines[side])
            value["speedup"] = round(value["tokens_per_second"] / found[PLAIN]["tokens_per_second"], 3)
        result[f"batch_{rows}"] = found
        print(json.dumps({rows: found}), file=sys.stderr, flush=True)
        # a run that is cut off leaves what it measured
        last = rows == given.batches[-1]
        finish("draft_rollouts", result, given.save, lambda: installed("torch", "transformers"), given.device, not last)


def make_engine(model: Any, head: Any, side: str) -> EmbeddedEngine:
    """Return an engine of the shared model for a side: plain, K or KxN drafts, auto; with ``-launched`` without CUDA graphs."""
    name, _, launched = side.partition("-")
    engine = EmbeddedEngine(model, Settings(lambda tokens: "", eos=[1], cuda_graphs=not launched))
    if name in (PLAIN, AGAIN):
        return engine
    depth, _, width = name.partition("x")
    lookahead = Auto() if name == "auto" else Lookahead(int(depth))
    if width:
        engine.decoder = TreeDecoder(head, lookahead, int(width))
    else:
        engine.decoder = SpeculativeDecoder(head, lookahead)
        use_rounds(engine, engine.decoder, engine.async_steps.used)
    return engine


def steps_of(engine: EmbeddedEngine) -> dict[str, Any]:
    """What the last rollouts of an engine with drafts show of acceptance, and why it uses no graphs if it should."""
    found: dict[str, Any] = {"refused": engine.async_steps.refused}
    lookahead = getattr(engine.decoder, "lookahead", None)
    if lookahead is not None and not isinstance(lookahead, Auto):
        found["tokens_per_step"] = round(lookahead.acceptance.length(lookahead.most), 2)
    return found


if __name__ == "__main__":
    main()
