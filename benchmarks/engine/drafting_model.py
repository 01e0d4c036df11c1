"""A model with a draft that fits it: made, trained on a language, kept in a file."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.languages import WORDS, Rollouts
from miles_core.contracts.trainer import Context
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_embedded import load_model
from miles_embedded.model.logprobs import logits_of
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.packing import pack
from miles_speculative.checkpoint import with_mtp
from miles_speculative.head import Head, attach
from miles_speculative.loss import divergence, entries

#: How often ``--pretrain`` steps are made at most, until the policy has learned its language.
_TIMES = 4


def drafting_model(given: argparse.Namespace) -> tuple[Any, Head]:
    """The model that the arguments ask for, and its MTP layer."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_checkpoint(given, Path(scratch))
        model = load_model(checkpoint, given.dtype, given.device)
        return model, attach(model, checkpoint)


def make_checkpoint(given: argparse.Namespace, scratch: Path) -> Path:
    """A dense Qwen3, or the real model, with an MTP layer."""
    if given.checkpoint:
        return with_mtp(given.checkpoint, scratch / "mtp")
    from transformers import Qwen3Config

    from miles_testing.tiny import tiny_tokenizer

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
    return random_checkpoint(config, tiny_tokenizer(), scratch)


def random_checkpoint(config: Any, tokenizer: Any, scratch: Path) -> Path:
    """One of random weights, with an MTP layer."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(scratch / "plain")
    tokenizer.save_pretrained(scratch / "plain")
    return with_mtp(scratch / "plain", scratch / "mtp")


def pretrained(model: Any, head: Head, language: Any, given: argparse.Namespace) -> dict[str, float]:
    """Training at the start, made now or read from ``--state``; returns the losses on new text, see ``held_out``. It goes on until the policy
    has learned the language, because what a draft of one that has not keeps says nothing."""
    kept = Path(given.state) if given.state else None
    if kept is not None and kept.exists():
        found = torch.load(kept, map_location=given.device)
        model.load_state_dict(found["model"])
        return dict(found["losses"])
    lessons = Rollouts(model, language, 256) if given.checkpoint else language
    for _ in range(_TIMES):
        train(model, head, lessons, given.pretrain, given, policy=not given.checkpoint)
        losses = held_out(model, head, lessons, given)
        if given.checkpoint or losses["loss"] < losses["guessing"] / 2:
            break
    else:
        raise SystemExit(
            f"the policy has learned too little ({losses}): give it more steps (--pretrain {given.pretrain}) or another --lr"
        )
    if kept is not None:
        torch.save({"model": model.state_dict(), "losses": losses}, kept)
    return losses


def train(
    model: Any, head: Head, language: Any, steps: int, given: argparse.Namespace, policy: bool, draft: bool = True
) -> None:
    """Next-token training of the policy, and of the draft towards the policy's distribution."""
    own = {id(p) for p in head.parameters.values()}
    # a step of the optimiser is smaller than what a weight in bfloat16 can take up
    wide = {p: p.detach().float().clone() for p in model.parameters()}
    groups = [
        {"params": [w for p, w in wide.items() if id(p) not in own], "lr": given.lr if policy else 0.0},
        {"params": [w for p, w in wide.items() if id(p) in own], "lr": given.draft_lr if draft else 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=min(10, steps))
    for step in range(1, steps + 1):
        loss, apart = losses_of(model, head, language, given)
        (loss + apart).backward()
        for p, w in wide.items():
            w.grad, p.grad = None if p.grad is None else p.grad.float(), None
        for group in groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimizer.step()
        rising.step()
        with torch.no_grad():
            for p, w in wide.items():
                p.copy_(w)
        if step % 50 == 0:
            print(json.dumps({"step": step, "loss": loss.item(), "kl": apart.item()}), file=sys.stderr, flush=True)


@torch.no_grad()
def held_out(model: Any, head: Head, language: Any, given: argparse.Namespace) -> dict[str, float]:
    """Mean losses of four batches that were not trained on, and ``guessing``: the loss of one who knows only which tokens there are."""
    each = [[x.item() for x in losses_of(model, head, language, given)] for _ in range(4)]
    loss, apart = (sum(column) / len(column) for column in zip(*each, strict=True))
    return {"loss": round(loss, 3), "kl": round(apart, 3), "guessing": round(math.log(min(given.vocab, WORDS)), 3)}


def losses_of(model: Any, head: Head, language: Any, given: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Of the next batch: the policy's cross-entropy, and the draft's KL divergence from the policy, a token each."""
    rows = [list(map(int, row)) for row in language.batch(given.train_rows, 96)]
    samples = [Sample(tokens=row, response_length=len(row) - 1, index=i, group_index=i) for i, row in enumerate(rows)]
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
    return loss, divergence(head, out, hidden.detach()[packing.sources], 1.0) / len(out)
