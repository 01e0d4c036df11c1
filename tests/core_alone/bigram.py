"""An engine and a trainer on core alone: a table of logits [previous token, next token]. A plugin in one file (``--plugins bigram.py``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from miles_core.data import Batch, WeightUnit
from miles_core.engine import Engine, Response
from miles_core.plugin import Plugin
from miles_core.trainer import Context, Output, Trainer

TABLE = "table.weight"

plugin = Plugin(
    name="bigram",
    summary="logits that depend on the previous token",
    version="0",
    core=">=0",
    provides={"engine": {"bigram": "BigramEngine"}, "trainer": {"bigram": "make_trainer"}},
    capabilities={"engine": ("score",)},
)


class BigramEngine(Engine):
    capabilities = frozenset({"score"})

    def __init__(self, run):
        self.run, self.table, self.served = run, torch.zeros(0), -1

    @property
    def version(self):
        return self.served

    async def start(self): ...

    async def stop(self): ...

    async def pause(self, mode="abort"): ...

    async def resume(self): ...

    async def abort(self, keys=None): ...

    async def update_weights(self, units, version):
        for encoded in units:
            self.table = encoded.parts[TABLE].detach().clone()
        self.served = version

    async def generate(self, request):
        random = torch.Generator().manual_seed(request.key)
        tokens, log_probs = [int(request.tokens[-1])], []
        for _ in range(request.sampling.max_new_tokens):
            row = self.table[tokens[-1]].log_softmax(-1)
            tokens.append(int(torch.multinomial(row.exp(), 1, generator=random)))
            log_probs.append(float(row[tokens[-1]]))
        new = tokens[1:]
        versions = [(0, self.served)]
        return Response(new, log_probs, "length", self.run.tokenizer.decode(new), versions)

    async def score(self, sequences, temperature=1.0, media=()):
        rows = [torch.as_tensor(np.asarray(sequence), dtype=torch.long) for sequence in sequences]
        return [self.table.log_softmax(-1)[row[:-1], row[1:]].numpy() for row in rows]


class BigramTrainer(Trainer):
    def __init__(self, run, policy, size):
        self.model = torch.nn.Embedding(size, size)
        torch.nn.init.zeros_(self.model.weight)
        self.groups = [{"params": list(self.model.parameters())}]
        self.optimizer = run.hooks.make("optimizer", "adamw", run=run, policy=policy, groups=self.groups)

    @property
    def chunks(self):
        return [self.model]

    def forward(self, chunk, micro_batch: Batch, ctx: Context):
        tokens = micro_batch.tokens
        log_probs = torch.zeros(len(tokens))
        targets = ctx.targets
        predicted = chunk(tokens[targets - 1]).log_softmax(-1).gather(-1, tokens[targets, None]).squeeze(-1)
        return Output(log_probs=log_probs.index_put((targets,), predicted))

    def context(self, batch, kind):
        return Context(kind, (), torch.arange(len(batch.tokens)), targets=batch.mask.nonzero().squeeze(-1))

    def log_probs(self, batch, kind, entropy=False):
        with torch.no_grad():
            return {"log_probs": self.callbacks.forward(self.model, batch, self.context(batch, kind)).log_probs}

    def step(self, batch, loss=None, lr=None):
        context = self.context(batch, "train")
        output = self.callbacks.forward(self.model, batch, context)
        found = (loss or self.callbacks.loss)(output, batch, context)
        found.value.backward()
        metrics = self.callbacks.optimizer_step()
        self.optimizer.zero_grad()
        means = {name: (float(total), float(weight)) for name, (total, weight) in found.metrics.items()}
        return means | {name: (value, 1.0) for name, value in metrics.items()}

    def optimizer_step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"grad_norm": float(norm), "lr": self.optimizer.param_groups[0]["lr"]}

    def reset_optimizer(self):
        self.optimizer.state.clear()

    def units(self, everywhere=False):
        yield WeightUnit({TABLE: self.model.weight.detach()})

    def save(self, directory: Path):
        save_file(self.model.state_dict(), directory / "model.safetensors")

    def load(self, directory: Path):
        self.model.load_state_dict(load_file(directory / "model.safetensors"))

    def export(self, directory, tokenizer, units=None): ...


def make_trainer(run, policy):
    return BigramTrainer(run, policy, len(run.tokenizer))
