"""Rollout with drafts against the same engine without, a draft that learns against one that is frozen, and ``auto`` over a grid.

A model with random weights is no use as it is: every draft of it is a guess. So the policy is first trained on a small synthetic language
(``--pretrain`` steps), and its MTP layer with it, as in a checkpoint that has one. Then:

- ``speedup``: tokens a second of the engine with k drafts, with ``auto`` and with trees, over those without, for each batch size and
  temperature: sides take turns step by step, and the lower quartiles of their steps' times are compared. A second side without drafts shows
  what of that is noise. ``auto`` is measured as in a run that goes on for long: it has generated ``--settle`` tokens a row before.
- ``grid``: ``auto`` for each batch size with drafts of several qualities: the draft's own, and ones whose distribution was flattened
  (``--sharpness``, a factor of its logits; 0 drafts any token).
- ``moving``: the policy learns another language; after every ``--move`` steps the acceptance of the draft as it was and of one that was
  trained on the policy's own tokens (soft targets), and their speed-up at ``--moving-lookahead`` drafts.

On a GPU: ``--device cuda --dtype bfloat16 --layers 28 --hidden 1024 --vocab 32768 --batches 1,8,64,256``. ``--checkpoint DIR`` takes a real
model instead, and trains an MTP layer for it on what it writes itself. An empty ``--temperatures`` or ``--sharpness`` and ``--rounds 0`` leave
their part out, and ``--state`` lets several calls share one training.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from benchmarks.engine.drafting_model import drafting_model, pretrained, put, train
from benchmarks.engine.drafting_sides import Flat, compared
from benchmarks.engine.languages import Language, Prompts, Rollouts
from benchmarks.measure import finish, installed, options
from miles_embedded import decoder_layers
from miles_speculative.head import Head


def main() -> None:
    """Run what the arguments ask for."""
    given = parse()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model, head = drafting_model(given)
    given.layers, given.vocab = len(decoder_layers(model)), len(model.get_output_embeddings().weight)
    language: Any = Prompts(given.checkpoint) if given.checkpoint else Language(given.vocab, seed=1)
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "draft_parameters": sum(p.numel() for p in head.parameters.values()),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "threads": given.threads,
    }
    result["pretrain"] = pretrained(model, head, language, given)
    say(result)
    result["speedup"] = speedups(model, head, language, given)
    result["grid"] = grid(model, head, language, given)
    if given.rounds:
        result["moving"] = moving(model, head, given)
    variant = "-".join(filter(None, (given.device, given.label)))
    finish("speculative", result, given.save, lambda: installed("torch", "transformers"), variant)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__)
    for name, default in (
        ("layers", 8),
        ("hidden", 384),
        ("vocab", 256),
        ("tokens", 256),
        ("settle", 512),
        ("pretrain", 100),
        ("train-rows", 8),
        ("turns", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--state", help="keep what training at the start made in this file, and read it where there is one"
    )
    parser.add_argument("--label", default="", help="further words in the name of the saved file")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--sharpness", default="", help="factors of the draft's logits for the grid, as 1,0.3,0")
    parser.add_argument("--checkpoint", help="a Hugging Face checkpoint instead of the synthetic model")
    parser.add_argument(
        "--lookaheads", default="1,2,4,auto", help="K, auto, or KxN for a tree of depth K with N candidates at each"
    )
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--move", type=int, default=20, help="steps of the moving policy between measurements")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of the moving policy; 0 leaves it out")
    parser.add_argument("--moving-lookahead", default="2")
    parser.add_argument("--moving-rows", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--draft-lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def speedups(model: Any, head: Head, language: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a batch size and temperature."""
    found = []
    for rows in map(int, given.batches.split(",")):
        for temperature in map(float, filter(None, given.temperatures.split(","))):
            entry = {"rows": rows, "temperature": temperature}
            entry |= compared(model, head, language, given, rows, temperature, given.lookaheads.split(","))
            say(entry)
            found.append(entry)
    return found


def grid(model: Any, head: Head, language: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    """``auto`` at temperature 1, one entry a batch size and sharpness."""
    found = []
    for sharpness in map(float, filter(None, given.sharpness.split(","))):
        for rows in map(int, given.batches.split(",")):
            entry = {"rows": rows, "sharpness": sharpness}
            entry |= compared(model, Flat(head, sharpness), language, given, rows, 1.0, ["auto"])
            say(entry)
            found.append(entry)
    return found


def moving(model: Any, head: Head, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Both drafts while the policy learns another language."""
    language = Language(given.vocab, seed=2)
    frozen = {name: p.detach().clone() for name, p in head.parameters.items()}
    trained, found = dict(frozen), []
    for number in range(given.rounds + 1):
        if number:
            put(head, trained)
            train(model, head, language, given.move, given, policy=True, draft=False)
            train(model, head, Rollouts(model, language), given.move, given, policy=False)
            trained = {name: p.detach().clone() for name, p in head.parameters.items()}
        entry: dict[str, Any] = {"steps": number * given.move}
        for name, weights in (("frozen", frozen), ("trained", trained)):
            put(head, weights)
            sides = [given.moving_lookahead, "auto"]
            entry[name] = compared(model, head, language, given, given.moving_rows, 1.0, sides)
        say(entry)
        found.append(entry)
    return found


def say(what: Any) -> None:
    """Each result as soon as it is there, as one JSON line: a time limit may cut the rest."""
    print(json.dumps(what), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
