"""What one GPU holds of the embedded trainer and engine, and which other options would take less. Imports no torch.

The trainer keeps a BF16 copy of each parameter, an FP32 master, its FP32 gradient and two FP32 moments: 18 bytes (16 where the copy is
FP32 and its own master). ``full_shard`` divides all of it among the ranks, and puts one decoder layer together at a time, the next one
ahead of it. Activations are counted per token as Transformers' modules keep them; with recomputation a layer keeps its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from miles_core.plugin import Facts, Parts, Usage
from miles_core.trainer import MICRO_BATCH_TOKENS
from miles_embedded.memory.model_size import ModelSize, model_size

#: Elements of logits held at once (``model.logprobs``), and bytes of each with its copies and gradient.
LOGITS, LOGIT_BYTES = 1 << 26, 14
#: Bytes of a CUDA context with its libraries, and of NCCL's buffers where there are several ranks.
CONTEXT, CHANNELS = 1.0e9, 1.0e9
#: Sums of gradients travel in pieces of this many FP32 elements (``trainer.data_parallel``).
BUCKET = 1 << 24
#: GPUs of a machine where nothing says how many there are.
_MACHINE = 8


@dataclass(frozen=True)
class Training:
    """How a rank trains.

    Attributes:
        width: bytes of a parameter and of an activation.
        ranks: that train together.
        sharded: weights, gradients and optimizer are divided among them.
        tokens: of a micro-batch.
        recompute: layers are computed again in the backward pass.
        reference: a second model, which is not trained.
    """

    width: int
    ranks: int
    sharded: bool
    tokens: int
    recompute: bool
    reference: bool

    @property
    def share(self) -> float:
        """Of the model that one rank keeps."""
        return 1 / self.ranks if self.sharded else 1.0


def usage(facts: Facts, model: Mapping[str, Any]) -> Iterator[Usage]:
    """See ``miles_core.plugin.Plugin.memory``."""
    size = size_of(facts, model)
    if size is None or facts.value("model.device") == "cpu":
        return
    if facts.value("trainer") == "embedded":
        yield _trainer(facts, size)
    if facts.value("engine") == "embedded":
        yield _engine(facts, size)


def size_of(facts: Facts, model: Mapping[str, Any]) -> ModelSize | None:
    """The sizes of the run's model; None where ``config.json`` does not give them."""
    return model_size(model, int(facts.value("model.moe_layers") or 0), int(facts.value("model.mtp_layers") or 0))


def longest_sample(facts: Facts) -> tuple[int, str]:
    """Tokens of the longest sample, and where the number comes from."""
    if limit := facts.value("rollout.max_context_len"):
        return int(limit), "--rollout-max-context-len"
    answer = int(facts.value("rollout.max_response_len") or 1024)
    if prompt := facts.value("rollout.max_prompt_len"):
        return int(prompt) + answer, "longest prompt and response"
    return answer + 1024, "longest response, and a prompt of 1,024 tokens (--rollout-max-prompt-len bounds it)"


def wanted_rows(facts: Facts) -> int:
    """Sequences that one engine may decode at once: all samples of a rollout, or as many as are allowed."""
    prompts = facts.value("rollout.over_sampling_batch_size") or facts.value("rollout.batch_size") or 1
    samples = int(prompts) * int(facts.value("rollout.n_samples_per_prompt") or 1)
    allowed = int(facts.value("rollout.max_running_requests") or 256)
    return allowed if facts.value("schedule") == "async" else min(allowed, samples)


def training_of(facts: Facts) -> Training:
    """From the options of a run."""
    ranks = 1
    if facts.value("plugin.ray"):
        ranks = int(facts.value("ray.actor_num_nodes") or 1) * int(facts.value("ray.actor_num_gpus_per_node") or 1)
    counted = facts.value("train.micro_batch_size") and not facts.value("train.use_dynamic_batch_size")
    longest = longest_sample(facts)[0]
    limit = int(facts.value("train.max_tokens_per_gpu") or MICRO_BATCH_TOKENS["cuda"])
    return Training(
        width=_width(facts),
        ranks=ranks,
        sharded=ranks > 1 and facts.value("embedded.sharding_strategy") != "no_shard",
        tokens=int(facts.value("train.micro_batch_size")) * longest if counted else max(limit, longest),
        recompute=bool(facts.value("train.activation_checkpointing")),
        reference=bool(facts.value("algorithm.kl_loss_coef") or facts.value("algorithm.kl_coef")),
    )


def _width(facts: Facts) -> int:
    return 4 if facts.value("model.dtype") == "float32" else 2


def trainer_parts(size: ModelSize, how: Training) -> Parts:
    """One rank's memory while it trains, in bytes."""
    held = size.parameters * how.share
    gathered = reduced = 0.0
    if how.sharded:
        root = size.embeddings
        gathered = how.width * (root + 2 * size.layer)
        reduced = how.width * (root + size.layer) + 4 * max(root, size.layer)
    elif how.ranks > 1:
        reduced = 4 * BUCKET
    models = 2 if how.reference else 1
    return Parts(
        weights=models * how.width * held + gathered,
        gradients=4 * held + reduced,
        optimizer=(12 if how.width == 2 else 8) * held,
        activations=activations(size, how),
        other=CONTEXT + (CHANNELS if how.ranks > 1 else 0),
    )


def activations(size: ModelSize, how: Training) -> float:
    """Bytes at the peak of a forward and backward pass over one micro-batch.

    A layer keeps two norms' inputs in FP32 beside their outputs, queries, keys and values before and after rotation, attention's
    output, and gate, up, activated gate and product of a feed-forward layer.
    """
    attended = size.attention / size.hidden
    kept = 2 * (2 * size.hidden * how.width + 4 * size.hidden) + how.width * (1.5 * attended + 4 * size.active_ffn)
    layers = size.layers * how.width * size.hidden + kept if how.recompute else size.layers * kept
    logits = LOGIT_BYTES * min(LOGITS, how.tokens * size.vocab)
    return float(how.tokens * (layers + 6 * how.width * size.hidden) + logits)


def _trainer(facts: Facts, size: ModelSize) -> Usage:
    how = training_of(facts)
    strategy = "" if how.ranks == 1 else f", {facts.value('embedded.sharding_strategy')}"
    note = (
        f"trainer: {size.parameters / 1e9:,.3g} billion parameters on {how.ranks} rank{'s' * (how.ranks > 1)}{strategy}; "
        f"micro-batches of {how.tokens:,} tokens ({longest_sample(facts)[1]})"
    )
    parts = trainer_parts(size, how)
    return Usage(
        "trainer",
        "rank",
        parts,
        parts.other,
        note=note,
        processes=how.ranks,
        fitting=lambda budget, alone: _smaller_trainer(facts, size, how, budget, alone),
    )


def _smaller_trainer(
    facts: Facts, size: ModelSize, how: Training, budget: float, alone: float
) -> Iterator[dict[str, Any]]:
    """Changes with which a rank takes at most ``budget`` bytes, or on a GPU of its own ``alone``."""
    longest = longest_sample(facts)[0]
    recompute = {"train.activation_checkpointing": True}
    ways: list[tuple[Training, dict[str, Any]]] = [(how, {})]
    if not how.recompute:
        ways.append((replace(how, recompute=True), recompute))
    if how.tokens > longest:
        short, limit = replace(how, tokens=longest), {"train.max_tokens_per_gpu": longest}
        ways += [(short, limit), (replace(short, recompute=True), {**recompute, **limit})]
    if how.ranks > 1 and not how.sharded:
        ways += [(replace(w, sharded=True), {"embedded.sharding_strategy": "full_shard", **c}) for w, c in ways]
    yield from (change for way, change in ways if change and trainer_parts(size, way).total <= budget)
    limit_there = budget if facts.value("colocate") else alone
    for ranks in (how.ranks << n for n in range(1, 9)):
        found = next(
            (c for w, c in ways if trainer_parts(size, replace(w, ranks=ranks, sharded=True)).total <= limit_there),
            None,
        )
        if found is not None:
            how_many = {**found, "embedded.sharding_strategy": "full_shard"}
            yield {**_on_ranks(facts, ranks, engines_gpus(facts)), **how_many}
            yield {**_on_ranks(facts, ranks, 0), **how_many, "colocate": True}
            return


def engines_gpus(facts: Facts) -> int:
    """GPUs that engines take for themselves under a runtime of several processes."""
    if facts.value("colocate"):
        return 0
    found = facts.value("ray.rollout_num_gpus") if facts.value("plugin.ray") else None
    per_engine = facts.value("ray.rollout_num_gpus_per_engine") if facts.value("plugin.ray") else None
    return int(found or per_engine or 1)


def _on_ranks(facts: Facts, ranks: int, engines: int) -> dict[str, Any]:
    """How a run gets so many ranks next to ``engines`` GPUs of engines."""
    count = int(facts.value("gpu.count") or 0)
    each = min(max(count, _MACHINE), ranks)
    nodes, machines = -(-ranks // each), -(-(ranks + engines) // max(count, _MACHINE))
    found: dict[str, Any] = {"runtime": "ray"}
    if count < min(ranks + engines, _MACHINE):
        found["gpu.count"] = _MACHINE
    if machines > int(facts.value("gpu.machines") or 1):
        found["gpu.machines"] = machines
    return {**found, "ray.actor_num_nodes": nodes, "ray.actor_num_gpus_per_node": each}


def _engine(facts: Facts, size: ModelSize) -> Usage:
    rows, (longest, why) = wanted_rows(facts), longest_sample(facts)
    inline = facts.value("runtime") == "inline"
    quantised = facts.value("rollout.precision") not in ("bf16", None) and not facts.value("precision.emulated")
    codes = float(size.parameters - size.embeddings) if quantised and facts.value("gpu.sm") else 0.0
    weights = 0.0 if shares_storage(facts) else float(_width(facts) * size.parameters)
    width = 1 if str(facts.value("rollout.kv_cache_dtype")).startswith("float8") else _width(facts)
    row = float(longest * size.cached * width)
    drafts = size.mtp * float(_width(facts)) if facts.value("plugin.speculative") else 0.0
    parts = Parts(
        weights=weights + codes,
        draft=drafts,
        cache=rows * row,
        activations=4.0 * min(rows * size.vocab, LOGITS) + 4.0 * _width(facts) * size.hidden * longest,
        other=0.0 if inline else CONTEXT,
    )
    note = f"engine: a cache of {rows:,} sequences of {longest:,} tokens ({why}; --max-running-requests bounds the sequences)"
    if not weights:
        note += "; its weights are the trainer's"

    def fitting(budget: float, alone: float) -> Iterator[dict[str, Any]]:
        left = int((budget - (parts.total - parts.cache)) // row)
        if 1 <= left < rows:
            yield {"rollout.max_running_requests": left}

    return Usage("engine", "GPU", parts, parts.other, note=note, fitting=fitting)


def shares_storage(facts: Facts) -> bool:
    """Whether engine and trainer are one set of weights in one process."""
    here = facts.value("runtime") == "inline" and facts.value("trainer") == "embedded"
    return here and bool(facts.value("plugin.zero_copy")) and facts.value("schedule") == "sync"
