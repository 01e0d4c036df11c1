"""Rollout with drafts against the same engine without, a draft that learns against one that is frozen, and ``auto`` over a grid.

A model with random weights is no use as it is: every draft of it is a guess. So the policy is first trained on a small synthetic language
(``--pretrain`` steps), and its MTP layer with it, as in a checkpoint that has one. Then:

- ``speedup``: tokens a second of the engine with k drafts, with ``auto`` and with trees, over those without, for each batch size and
  temperature: sides take turns step by step, and the lower quartiles of their steps' times are compared.
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
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from measure import finish, installed, options
from torch import Tensor

from miles_core.backend import Request, Sampling
from miles_core.contracts.trainer import Context
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_embedded import decoder_layers, load_model
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.logprobs import logits_of
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.packing import pack
from miles_speculative.checkpoint import with_mtp
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.head import Head, attach
from miles_speculative.lookahead import Auto, Lookahead
from miles_speculative.loss import divergence, entries
from miles_speculative.report import rates
from miles_speculative.tree import TreeDecoder


def main() -> None:
    """Run what the arguments ask for."""
    given = parse()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_checkpoint(given, Path(scratch))
        model = load_model(checkpoint, given.dtype, given.device)
        head = attach(model, checkpoint)
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


def pretrained(model: Any, head: Head, language: Any, given: argparse.Namespace) -> dict[str, float]:
    """Losses of the last step of training at the start, made now or read from ``--state``."""
    kept = Path(given.state) if given.state else None
    if kept is not None and kept.exists():
        found = torch.load(kept, map_location=given.device)
        model.load_state_dict(found["model"])
        return dict(found["losses"])
    lessons = Rollouts(model, language, 256) if given.checkpoint else language
    losses = train(model, head, lessons, given.pretrain, given, policy=not given.checkpoint)
    if kept is not None:
        torch.save({"model": model.state_dict(), "losses": losses}, kept)
    return losses


def say(what: Any) -> None:
    """Progress."""
    print(what, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__)
    for name, default in (
        ("layers", 8),
        ("hidden", 384),
        ("vocab", 256),
        ("tokens", 256),
        ("pretrain", 100),
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


class Language:
    """Sequences that a model can learn: most tokens follow from the two before them, some are free."""

    def __init__(self, vocab: int, seed: int, free: float = 0.15) -> None:
        self.vocab, self.free = vocab, free
        self.generator = torch.Generator().manual_seed(seed)
        self.follows = torch.randint(2, vocab, (vocab, 4), generator=self.generator)

    def batch(self, count: int, length: int) -> Tensor:
        """[count, length] ids."""
        out = torch.randint(2, self.vocab, (count, length), generator=self.generator)
        chance = torch.rand(count, length, generator=self.generator)
        for t in range(2, length):
            known = self.follows[out[:, t - 1], out[:, t - 2] % 4]
            out[:, t] = torch.where(chance[:, t] < self.free, out[:, t], known)
        return out


class Prompts:
    """Chats for a real model."""

    def __init__(self, checkpoint: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.count = 0

    def batch(self, count: int, length: int) -> list[list[int]]:
        """``count`` prompts of about as many tokens as they have; ``length`` is not looked at."""
        asked = ("Explain how {} works.", "Write a short story about {}.", "What is {}? Answer in a list.")
        things = ("rain", "a clock", "the heart", "a market", "salt", "an engine", "the moon", "bread", "a library")
        self.count += count
        chosen = range(self.count - count, self.count)
        chats = [[{"role": "user", "content": asked[i % 3].format(things[i // 3 % 9])}] for i in chosen]
        return [self.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def make_checkpoint(given: argparse.Namespace, scratch: Path) -> Path:
    """A dense Qwen3, or the real model, with an MTP layer."""
    if given.checkpoint:
        return with_mtp(given.checkpoint, scratch / "mtp")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from miles_core.testing.tiny import tiny_tokenizer

    config = Qwen3Config(
        vocab_size=given.vocab,
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=max(given.hidden // 128, 1),
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(scratch / "plain")
    tiny_tokenizer().save_pretrained(scratch / "plain")
    return with_mtp(scratch / "plain", scratch / "mtp")


def train(
    model: Any, head: Head, language: Any, steps: int, given: argparse.Namespace, policy: bool, draft: bool = True
) -> dict[str, float]:
    """Next-token training of the policy, and of the draft towards the policy's distribution; losses of the last step."""
    own = {id(p) for p in head.parameters.values()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in own], "lr": given.lr if policy else 0.0},
        {"params": list(head.parameters.values()), "lr": given.draft_lr if draft else 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    last = {}
    for _ in range(steps):
        tokens = [list(map(int, row)) for row in language.batch(8, 96)]
        samples = [
            Sample(tokens=row, response_length=len(row) - 1, index=i, group_index=i) for i, row in enumerate(tokens)
        ]
        batch = collate(samples).to(given.device)
        packing = pack(batch, share=False)
        ctx = Context("train", tuple(range(given.layers)), packing.rows)
        ctx.attached["packing"] = packing
        call = PackedCall(ctx, packing)
        hidden = model.model(
            input_ids=batch.tokens[packing.rows][None], position_ids=packing.positions[None], use_cache=False, call=call
        ).last_hidden_state[0]
        logits = logits_of(model, hidden[packing.sources]).float()
        loss = torch.nn.functional.cross_entropy(logits, batch.tokens[packing.targets])
        out = entries(head, hidden.detach(), batch.tokens, ctx, call)[packing.sources]
        apart = divergence(head, out, hidden.detach()[packing.sources], 1.0) / len(out)
        optimizer.zero_grad()
        (loss + apart).backward()
        optimizer.step()
        last = {"loss": loss.item(), "kl": apart.item()}
    return last


def decoder(draft: Any, name: str) -> SpeculativeDecoder | None:
    """``plain``, ``auto``, ``K`` or ``KxN``."""
    if name == "plain":
        return None
    depth, _, width = name.partition("x")
    lookahead = Auto() if name == "auto" else Lookahead(int(depth))
    return TreeDecoder(draft, lookahead, int(width)) if width else SpeculativeDecoder(draft, lookahead)


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


class Flat:
    """A draft whose distribution is flatter than it was."""

    def __init__(self, draft: Head, sharpness: float) -> None:
        self.draft, self.sharpness = draft, sharpness
        self.policy, self.parameters = draft.policy, draft.parameters

    def __call__(self, *given: Any) -> Tensor:
        return self.draft(*given)

    def logits(self, out: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        return self.draft.logits(out) * self.sharpness


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


def compared(
    model: Any, head: Any, language: Any, given: argparse.Namespace, rows: int, temperature: float, names: list[str]
) -> dict[str, Any]:
    """All sides answer the same prompts at the same time, a step of one after a step of another, so that they see the same machine; a side
    keeps its decoder over the turns, and ``auto`` what it learned. The first turn is not counted. Of each turn the lower quartiles are compared;
    ``turns`` are the lowest and the highest of these ratios, ``speedup`` their median."""
    decoders = {name: decoder(head, name) for name in ("plain", *names)}
    prompts = [list(map(int, prompt)) for prompt in language.batch(rows, 16)]
    turns = [generate(model, prompts, given, temperature, decoders) for _ in range(given.turns + 1)][1:]
    result: dict[str, Any] = {"plain": round(median(1 / turn["plain"].seconds for turn in turns), 1)}
    for name in names:
        ratios = [round(turn["plain"].seconds / turn[name].seconds, 3) for turn in turns]
        rest = {n: round(median(t[name].said.get(n, 0.0) for t in turns), 3) for n in turns[0][name].said}
        rest.pop("speedup", None)  # what the run itself would report
        result[name] = {"speedup": round(median(ratios), 3), "turns": [min(ratios), max(ratios)], **rest}
    return result


@dataclass
class Side:
    """What one side did in a turn: seconds of its steps by drafts, its tokens, and what its requests reported."""

    steps: dict[int, list[float]]
    tokens: int
    said: dict[str, float]

    @property
    def seconds(self) -> float:
        """A token. Steps with as many drafts take the lower quartile of their times, because other work on the machine only ever adds to it."""
        each = self.steps.values()
        took = sum(len(e) * (quantiles(e, n=4, method="inclusive")[0] if len(e) > 1 else e[0]) for e in each)
        return took / self.tokens


def generate(
    model: Any, prompts: list[list[int]], given: argparse.Namespace, temperature: float, decoders: dict[str, Any]
) -> dict[str, Side]:
    """One turn."""
    sampling = Sampling(given.tokens, temperature=temperature, ignore_eos=True)
    requests = [Request(p, sampling, key=i) for i, p in enumerate(prompts)]
    engines, steps = {}, {}
    for name, made in decoders.items():
        settings = Settings(lambda tokens: "", eos=[1], max_running_requests=len(prompts))
        if made is not None:
            settings.decoder = made
        engines[name] = EmbeddedEngine(model, settings)
        steps[name] = timed(engines[name], given)

    async def run() -> list[Any]:
        return await asyncio.gather(*[asyncio.gather(*map(e.generate, requests)) for e in engines.values()])

    found = {}
    for name, responses in zip(engines, asyncio.run(run()), strict=True):
        said: dict[str, float] = {}
        for response in responses:
            for metric, value in response.metrics.items():
                said[metric] = said.get(metric, 0.0) + value
        found[name] = Side(steps[name], sum(len(r.tokens) for r in responses), rates(said) if said else {})
    return found


def timed(engine: EmbeddedEngine, given: argparse.Namespace) -> dict[int, list[float]]:
    """Seconds of the engine's steps from now on, prompts and bookkeeping included, by the drafts of each."""
    found: dict[int, list[float]] = {}
    step, count = engine._step, engine.decoder
    # on one CPU thread, the time of the processor: the time of the day also counts what others do with it
    clock = time.process_time if given.device == "cpu" and given.threads == 1 else time.perf_counter

    def drafted() -> float:
        return count.ledger._sums["lookahead"] if isinstance(count, SpeculativeDecoder) else 0.0

    def run() -> None:
        before, start = drafted(), clock()
        step()
        if given.device == "cuda":
            torch.cuda.synchronize()
        found.setdefault(int(drafted() - before), []).append(clock() - start)

    engine._step = run  # type: ignore[method-assign]
    return found


def ask(engine: EmbeddedEngine, requests: list[Request]) -> list[Any]:
    """All at once."""

    async def run() -> list[Any]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return asyncio.run(run())


class Rollouts:
    """What the policy itself generates, as a language to train a draft on: ``count`` responses, of which each batch has some."""

    def __init__(self, model: Any, language: Any, count: int = 64, length: int = 96) -> None:
        engine = EmbeddedEngine(model, Settings(lambda tokens: "", eos=[1], max_running_requests=count))
        prompts = [list(map(int, prompt)) for prompt in language.batch(count, 16)]
        requests = [Request(p, Sampling(length - 16, ignore_eos=True), key=i) for i, p in enumerate(prompts)]
        self.rows = [p + r.tokens for p, r in zip(prompts, ask(engine, requests), strict=True)]
        self.given = 0

    def batch(self, count: int, length: int) -> list[list[int]]:
        """``count`` sequences; ``length`` is not looked at."""
        self.given += count
        return [self.rows[i % len(self.rows)] for i in range(self.given - count, self.given)]


def moving(model: Any, head: Head, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Both drafts while the policy learns another language."""
    language = Language(given.vocab, seed=2)
    frozen = {name: p.detach().clone() for name, p in head.parameters.items()}
    trained, found = dict(frozen), []
    for number in range(given.rounds + 1):
        if number:
            put(head, trained)
            train(model, head, language, given.move, given, policy=True, draft=False)
            train(model, head, Rollouts(model, language), max(given.move // 2, 1), given, policy=False)
            trained = {name: p.detach().clone() for name, p in head.parameters.items()}
        entry: dict[str, Any] = {"steps": number * given.move}
        for name, weights in (("frozen", frozen), ("trained", trained)):
            put(head, weights)
            sides = [given.moving_lookahead, "auto"]
            entry[name] = compared(model, head, language, given, given.moving_rows, 1.0, sides)
        say(entry)
        found.append(entry)
    return found


@torch.no_grad()
def put(head: Head, weights: dict[str, Tensor]) -> None:
    """Give the draft these weights."""
    for name, parameter in head.parameters.items():
        parameter.copy_(weights[name])


if __name__ == "__main__":
    main()
