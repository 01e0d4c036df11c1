"""A model with a draft that fits it: made, trained on a language, kept in a file."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from languages import Rollouts
from torch import Tensor

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


@torch.no_grad()
def put(head: Head, weights: dict[str, Tensor]) -> None:
    """Give the draft these weights."""
    for name, parameter in head.parameters.items():
        parameter.copy_(weights[name])
