"""Rollout with drafts against the same engine without, a draft that learns against one that is frozen, and ``auto`` over a grid.

    python benchmarks/speculative.py [--layers 8 --hidden 384 --tokens 256 --batches 1,8,64] [--device cuda --dtype bfloat16]

A model of ``--layers`` decoder layers with random weights is no use as it is: every draft of it is a guess. So the policy is
first trained on a small synthetic language (``--pretrain`` steps), and its MTP layer with it, as in a real checkpoint. Then:

- ``speedup``: tokens a second of the engine with k drafts, and with ``auto``, over those without, at each batch size and temperature.
- ``moving``: the policy is trained on another language; after every ``--move`` steps the acceptance of a frozen draft and of one that was
  trained on the policy's own tokens (soft targets).

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_core.backend import Request, Sampling
from miles_core.contracts.trainer import Context
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_embedded import load_model
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


def main() -> None:
    """Run what the arguments ask for."""
    options = parse()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_checkpoint(options, Path(scratch))
        model = load_model(checkpoint, options.dtype, options.device)
        head = attach(model, checkpoint)
    language = Language(options.vocab, seed=1)
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "draft_parameters": sum(p.numel() for p in head.parameters.values()),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "dtype": options.dtype,
        "tokens": options.tokens,
        "pretrain": train(model, head, language, options.pretrain, options, policy=True),
    }
    result["speedup"] = speedups(model, head, language, options)
    if options.move:
        result["moving"] = moving(model, head, options)
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="generated a request")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--lookaheads", default="1,2,4")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--pretrain", type=int, default=150)
    parser.add_argument(
        "--move", type=int, default=20, help="steps between measurements of the moving policy; 0 leaves it out"
    )
    parser.add_argument("--rounds", type=int, default=4, help="measurements of the moving policy")
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


def make_checkpoint(options: argparse.Namespace, scratch: Path) -> Path:
    """A dense Qwen3 with an MTP layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from miles_core.testing.tiny import tiny_tokenizer

    config = Qwen3Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(options.hidden // 128, 1),
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
    model: Any, head: Head, language: Any, steps: int, options: argparse.Namespace, policy: bool, draft: bool = True
) -> dict[str, float]:
    """Next-token training of the policy, and of the draft towards the policy's distribution; losses of the last step."""
    own = {id(p) for p in head.parameters.values()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in own], "lr": options.lr if policy else 0.0},
        {"params": list(head.parameters.values()), "lr": options.draft_lr if draft else 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    last = {}
    for _ in range(steps):
        tokens = language.batch(8, 96)
        samples = [
            Sample(tokens=row.tolist(), response_length=len(row) - 1, index=i, group_index=i)
            for i, row in enumerate(tokens)
        ]
        batch = collate(samples).to(options.device)
        packing = pack(batch, share=False)
        ctx = Context("train", tuple(range(options.layers)), packing.rows)
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


def speedups(model: Any, head: Head, language: Language, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a batch size and temperature."""
    found = []
    for rows in map(int, options.batches.split(",")):
        for temperature in map(float, options.temperatures.split(",")):
            plain = generate(model, head, language, options, rows, temperature, None)
            entry: dict[str, Any] = {"rows": rows, "temperature": temperature, "plain": plain["tokens_per_second"]}
            for name in (*options.lookaheads.split(","), "auto"):
                lookahead = Auto() if name == "auto" else Lookahead(int(name))
                drafted = generate(model, head, language, options, rows, temperature, lookahead)
                # the machine may be another's meanwhile: the better of two plain measurements around it
                again = generate(model, head, language, options, rows, temperature, None)
                base = max(plain["tokens_per_second"], again["tokens_per_second"])
                entry[name] = {"speedup": drafted["tokens_per_second"] / base, **drafted}
            print(entry, flush=True)
            found.append(entry)
    return found


def generate(
    model: Any,
    head: Head,
    language: Language,
    options: argparse.Namespace,
    rows: int,
    temperature: float,
    lookahead: Lookahead | None,
) -> dict[str, float]:
    """Tokens a second of ``rows`` requests at once, and how many drafts were kept."""
    settings = Settings(lambda tokens: "", eos=[1], max_running_requests=rows)
    if lookahead is not None:
        settings.decoder = SpeculativeDecoder(head, lookahead)
    engine = EmbeddedEngine(model, settings)
    prompts = language.batch(rows, 16).tolist()
    sampling = Sampling(options.tokens, temperature=temperature, ignore_eos=True)

    async def run() -> list[Any]:
        return await asyncio.gather(*[engine.generate(Request(p, sampling, key=i)) for i, p in enumerate(prompts)])

    start = time.perf_counter()
    responses = asyncio.run(run())
    seconds = time.perf_counter() - start
    sums: dict[str, float] = {}
    for response in responses:
        for name, value in response.metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    found = {"tokens_per_second": sum(len(r.tokens) for r in responses) / seconds}
    if sums.get("drafted"):
        kept = sum(value for name, value in sums.items() if name.startswith("kept_"))
        found |= {"accept_rate": kept / sums["drafted"], "lookahead": sums["lookahead"] / sums["decode_steps"]}
    return found


class Rollouts:
    """What the policy itself generates, as a language to train a draft on."""

    def __init__(self, model: Any, head: Head, language: Language, options: argparse.Namespace) -> None:
        self.model, self.head, self.language, self.options = model, head, language, options

    def batch(self, count: int, length: int) -> Tensor:
        """[count, length] ids: prompts and what the policy continues them with."""
        engine = EmbeddedEngine(self.model, Settings(lambda tokens: "", eos=[1], max_running_requests=count))
        prompts = self.language.batch(count, 16).tolist()
        sampling = Sampling(length - 16, ignore_eos=True)

        async def run() -> list[Any]:
            return await asyncio.gather(*[engine.generate(Request(p, sampling, key=i)) for i, p in enumerate(prompts)])

        return torch.tensor([p + r.tokens for p, r in zip(prompts, asyncio.run(run()), strict=True)])


def moving(model: Any, head: Head, options: argparse.Namespace) -> list[dict[str, float]]:
    """Acceptance of both drafts and speed-up at four drafts, while the policy learns another language."""
    language = Language(options.vocab, seed=2)
    frozen = {name: p.detach().clone() for name, p in head.parameters.items()}
    trained = {name: p.detach().clone() for name, p in head.parameters.items()}
    rows, found = 16, []
    for number in range(options.rounds + 1):
        if number:
            put(head, trained)
            train(model, head, language, options.move, options, policy=True, draft=False)
            train(
                model, head, Rollouts(model, head, language, options), max(options.move // 2, 1), options, policy=False
            )
            trained = {name: p.detach().clone() for name, p in head.parameters.items()}
        entry: dict[str, float] = {"steps": number * options.move}
        plain = generate(model, head, language, options, rows, 1.0, None)
        for name, weights in (("frozen", frozen), ("trained", trained)):
            put(head, weights)
            drafted = generate(model, head, language, options, rows, 1.0, Lookahead(3))
            entry |= {
                f"{name}_accept_rate": drafted["accept_rate"],
                f"{name}_speedup": drafted["tokens_per_second"] / plain["tokens_per_second"],
            }
        print(entry, flush=True)
        found.append(entry)
    return found


@torch.no_grad()
def put(head: Head, weights: dict[str, Tensor]) -> None:
    """Give the draft these weights."""
    for name, parameter in head.parameters.items():
        parameter.copy_(weights[name])


if __name__ == "__main__":
    main()
