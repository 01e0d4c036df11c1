"""The first updates of a new EAGLE head, with and without a warm-up of its learning rate: divergence and acceptance on new text.

    python benchmarks/engine/head_start.py --threads 1 --save

A small Qwen3 learns a synthetic language. Its residual stream is then scaled (embeddings and the outputs of its layers; norms remove the factor,
so it computes the same), because the streams of deep trained models are large and a head's output reads them. ``acceptance`` is the mean over
tokens of the sum of min(p, q): the probability that the first drafted token is accepted at temperature 1.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.engine.languages import Language
from benchmarks.measure import finish, installed, options
from miles_core.contracts.trainer import Context
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_embedded import load_model
from miles_embedded.model.logprobs import logits_of
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.packing import pack
from miles_speculative.eagle import attach_eagle, new_eagle
from miles_speculative.loss import distance, divergence, entries
from miles_speculative.training import FEATURES, WARMUP
from miles_testing.tiny import tiny_tokenizer

LAYERS, VOCAB, HIDDEN, SCALE = 2, 256, 128, 20.0
RATES, MARKS = (3e-2, 1e-2, 1e-3), (0, 5, 10, 20, 40, 60)


def run_model(model: Any, language: Language) -> tuple[Any, Any, Any, Any, Any]:
    """Return a batch of 8 sequences, its packing, context and call, and the model's last hidden states."""
    rows = [list(map(int, row)) for row in language.batch(8, 64)]
    batch = collate([Sample(tokens=row, response_length=63, index=i, group_index=i) for i, row in enumerate(rows)])
    packing = pack(batch, share=False)
    ctx = Context("train", tuple(range(LAYERS)), packing.rows)
    ctx.attached["packing"] = packing
    call = PackedCall(ctx, packing)
    ids, positions = batch.tokens[packing.rows][None], packing.positions[None]
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False, call=call).last_hidden_state[0]
    return batch, packing, ctx, call, hidden


def make_policy(directory: Path, steps: int) -> Path:
    """Train a model on the language, and scale its residual stream."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "plain")
    tiny_tokenizer().save_pretrained(directory / "plain")
    model, language = load_model(directory / "plain", "float32", "cpu"), Language(VOCAB, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    for _ in range(steps):
        batch, packing, _, _, hidden = run_model(model, language)
        optimizer.zero_grad()
        cross_entropy(logits_of(model, hidden[packing.sources]), batch.tokens[packing.targets]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name or name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(SCALE)
    model.save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    return directory / "model"


def start_head(path: Path, scratch: Path, rate: float, warmup: int) -> dict[str, Any]:
    """Train a new head for 60 updates; returns its divergence and acceptance on new text after some of them, and the largest divergence."""
    model = load_model(path, "float32", "cpu").requires_grad_(False)
    head = attach_eagle(model, new_eagle(path, scratch / "head", 1))
    own = [parameter.requires_grad_() for parameter in head.parameters.values()]
    optimizer, language = torch.optim.AdamW(own, rate, betas=(0.9, 0.98), weight_decay=0.0), Language(VOCAB, 1)
    language.generator.manual_seed(5)
    found: dict[str, Any] = {"peak": 0.0, "divergence": [], "acceptance": []}
    for step in range(MARKS[-1] + 1):
        if step in MARKS:
            for name, value in zip(("divergence", "acceptance"), measure_head(model, head), strict=True):
                found[name].append(round(value, 3))
        batch, packing, ctx, call, hidden = run_model(model, language)
        out, policy = entries(head, hidden, batch.tokens, ctx, call)[packing.sources], hidden[packing.sources]
        apart = divergence(head, out, policy, 1.0) / len(out)
        found["peak"] = round(max(found["peak"], apart.item()), 3)
        optimizer.zero_grad()
        (apart + FEATURES * distance(out, policy) / len(out)).backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / max(warmup, 1))
        optimizer.step()
    return found


@torch.no_grad()
def measure_head(model: Any, head: Any) -> tuple[float, float]:
    """Return the head's divergence from the policy, and its acceptance, on the same new text each time."""
    language = Language(VOCAB, 1)
    language.generator.manual_seed(77)
    batch, packing, ctx, call, hidden = run_model(model, language)
    out, policy = entries(head, hidden, batch.tokens, ctx, call)[packing.sources], hidden[packing.sources]
    p, q = logits_of(model, policy).softmax(-1), head.logits(out).softmax(-1)
    return divergence(head, out, policy, 1.0).item() / len(out), float(torch.minimum(p, q).sum(-1).mean())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pretrain", type=int, default=400, help="steps in which the policy learns the language")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    result: dict[str, Any] = {"updates": MARKS, "warmup": WARMUP}
    with tempfile.TemporaryDirectory() as directory:
        path = make_policy(Path(directory), given.pretrain)
        for rate in RATES:
            for warmup in (0, WARMUP):
                name = f"{rate:g}, {'warm-up' if warmup else 'no warm-up'}"
                result[name] = start_head(path, Path(directory), rate, warmup)
                print(name, result[name], file=sys.stderr, flush=True)
    finish("head_start", result, given.save, lambda: installed("miles-core", "torch", "transformers"))


if __name__ == "__main__":
    main()
