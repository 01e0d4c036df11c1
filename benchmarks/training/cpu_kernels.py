"""The kernels of ``plugins/cpu_kernels`` against what torch does without them, in one process, taking turns.

Each kernel at the sizes of the step in ``grpo_step.py``, forward and, where training uses it, forward with backward; then sweeps over
the sizes that the plugin's thresholds are about: ``PACKED_KEYS`` and ``DECODED_KEYS`` of attention, ``LARGEST`` of experts. The
thresholds are lifted here, so every size is computed by the kernel. Before a case is timed, results and gradients of both sides are
compared. What all layers of a call share (buckets, masks) is not counted.

The last line is one JSON object: milliseconds of each side, and the median over the turns of how many times faster the kernel is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from benchmarks.measure import finish, installed, options
from miles_core.contracts.trainer import Context
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_cpu_kernels import attention, experts, kernels, library
from miles_cpu_kernels.table import add_kernels
from miles_embedded.engine.attention import DecodeCall
from miles_embedded.engine.cache import Cache, CachedRows
from miles_embedded.model import grouped_experts as grouped
from miles_embedded.model.call import Call
from miles_embedded.model.operations import TORCH
from miles_embedded.model.sorted_choices import sort_choices
from miles_embedded.trainer.attention import PackedCall
from miles_embedded.trainer.packing import Packing, pack
from miles_formats.native import compiler

#: The model and the step of grpo_step.py; rows of a packed pass in training, and of a decode step.
HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, CHOICES, INNER, VOCABULARY = 128, 4, 2, 32, 8, 2, 128, 259
PROMPTS, SAMPLES, PROMPT, RESPONSE = 64, 8, 6, 16
TRAIN, DECODE = 7900, 500
#: Of the sweeps: packed rows of attention, rows and prompts of a decode step, rows of experts.
PACKED_ROWS, DECODE_PROMPTS, EXPERT_ROWS = 8192, 16, 2000
#: Numbers of two sides that computed the same, relative to their norm.
CLOSE = 1e-4
#: Calls of a side at a turn take at least this many seconds.
TURN = 0.005

Step = Callable[[], Any]


@dataclass
class Case:
    """One comparison.

    Attributes:
        name: the kernel and its sizes.
        torch: what runs without the kernel.
        compiled: the same with it.
        inputs: what backward gives gradients of; empty where only decoding uses this.
    """

    name: str
    torch: Step
    compiled: Step
    inputs: Sequence[Tensor] = ()


def norm(rows: int, heads: int, dim: int, train: bool) -> Case:
    """Of hidden states (one head) or of the heads of queries."""
    module = qwen.Qwen3MoeRMSNorm(dim)
    x = torch.randn(1, rows, heads, dim).requires_grad_(train)
    step = partial(kernels.rms_norm, x, module.weight, module.variance_epsilon)
    return Case(f"norm {rows}x{heads}x{dim}", partial(module, x), step, (x, module.weight) if train else ())


def rotation(rows: int, train: bool) -> Case:
    """Of queries and keys."""
    q, k = (by_head(rows, heads, train) for heads in (HEADS, KV_HEADS))
    angle = torch.randn(1, rows, DIM // 2).repeat(1, 1, 2)
    cosine, sine = angle.cos(), angle.sin()

    def compiled() -> tuple[Tensor, Tensor]:
        return kernels.rotate(q, cosine, sine), kernels.rotate(k, cosine, sine)

    step = partial(qwen.apply_rotary_pos_emb, q, k, cosine, sine)
    return Case(f"rotation {rows} rows", step, compiled, (q, k) if train else ())


def log_probs(rows: int) -> Case:
    """Of the trained tokens; decoding takes its own from the sampler."""
    logits, tokens = torch.randn(rows, VOCABULARY, requires_grad=True), torch.randint(0, VOCABULARY, (rows,))
    sides = (partial(step, logits, tokens) for step in (TORCH.log_probs, kernels.log_probs))
    return Case(f"log_probs {rows}x{VOCABULARY}", *sides, (logits,))


def routing(rows: int) -> Case:
    """Sorting choices by expert; training does the same."""
    _, index = choices(rows)
    places = [lambda: sort_choices(index, EXPERTS).place, lambda: kernels.sort_choices(index, EXPERTS).place]
    return Case(f"routing {rows} rows", *places)


def gather_sum(rows: int) -> Case:
    """The weighted sum of each row's choices, as decoding takes it; the experts' backward pass is in ``expert_layer``."""
    weights, index = choices(rows)
    found, x = sort_choices(index, EXPERTS), torch.randn(rows * CHOICES, HIDDEN)
    step = partial(kernels.gather_sum, x, found.place, weights)
    return Case(f"gather_sum {rows} rows", partial(grouped.combine, x, weights, found), step)


def expert_layer(rows: int, hidden: int, inner: int, train: bool) -> Case:
    """All experts of a layer, with sorting and weighted sum."""
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=EXPERTS, num_experts_per_tok=CHOICES
    )
    module = qwen.Qwen3MoeExperts(config)
    matrices = module.gate_up_proj, module.down_proj
    for weight in matrices:
        nn.init.normal_(weight, std=hidden**-0.5)
    x, (weights, index) = torch.randn(rows, hidden).requires_grad_(train), choices(rows)
    weights.requires_grad_(train)
    sides = (partial(step, x, index, weights, *matrices) for step in (TORCH.experts, experts.experts))
    return Case(f"experts {rows} rows {hidden}x{inner}", *sides, (x, weights, *matrices) if train else ())


def packed_attention(name: str, packing: Packing) -> Case:
    """Of one packed micro-batch in training."""
    rows, call = len(packing.rows), PackedCall(Context("train", (0,), packing.rows), packing)
    inputs = [by_head(rows, heads, True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return Case(f"attention {name}, {rows} rows, {call.longest} keys", *both(call, inputs), inputs)


def cached_attention(name: str, prompts: int, prompt: int, own: int) -> Case:
    """Of a decode step: each of ``prompts`` is shared by rows that have ``own`` tokens and feed one."""
    cache = Cache()
    slots = cache.add_prefixes([prompt] * prompts)
    rows = len(cache.add_rows(np.repeat(slots, SAMPLES)))
    cache.own.lengths[:rows] = own
    held = CachedRows(cache, np.arange(rows), np.ones(rows, np.int64), torch.device("cpu"))
    q, k, v = (by_head(rows, heads, False) for heads in (HEADS, KV_HEADS, KV_HEADS))
    for store in (cache.prefixes, cache.own):
        for kind in ("k", "v"):
            store.slab((kind, 0), KV_HEADS, (DIM,), k).normal_()
    call = DecodeCall(Context("rollout", (0,), torch.arange(rows)), held)
    return Case(f"decoding {name}, {rows} rows, {held.longest} tokens", *both(call, (q, k, v)))


def by_head(rows: int, heads: int, train: bool) -> Tensor:
    """[1, heads, rows, DIM] as a model has it: a view of rows."""
    return torch.randn(1, rows, heads, DIM).transpose(1, 2).requires_grad_(train)


def choices(rows: int) -> tuple[Tensor, Tensor]:
    """Weights and indices [rows, CHOICES] of a router."""
    weights, index = torch.randn(rows, EXPERTS).softmax(-1).topk(CHOICES)
    return weights, index


def both(call: Call, inputs: Sequence[Tensor]) -> tuple[Step, Step]:
    """One layer's attention by torch, and with the kernels."""
    layer = nn.Identity()
    layer.layer_idx = 0
    one, two = (
        partial(table.attention, call, layer, *inputs, DIM**-0.5, None) for table in (TORCH, add_kernels(TORCH))
    )
    return one, two


def micro_batch(prompts: int, samples: int, prompt: int, responses: Sequence[int]) -> Packing:
    """``samples`` responses to each prompt; of these lengths, in turn. The last token of each is not a row."""
    made = []
    for group in range(prompts):
        for _ in range(samples):
            length = responses[len(made) % len(responses)]
            tokens = [group % VOCABULARY] * prompt + [1] * length
            made.append(Sample(tokens=tokens, response_length=length, group_index=group, index=len(made)))
    return pack(collate(made))


def step_batch() -> Packing:
    """The step's: a response ends with each token with probability 1 / vocabulary, as a random model's does."""
    ends = np.random.default_rng(0).geometric(1 / VOCABULARY, PROMPTS * SAMPLES)
    return micro_batch(PROMPTS, SAMPLES, PROMPT, np.minimum(ends, RESPONSE).tolist())


def of_the_step() -> Iterator[Callable[[], Case]]:
    """Every kernel at the sizes of the step."""
    for rows, train in ((TRAIN, True), (DECODE, False)):
        yield partial(norm, rows, 1, HIDDEN, train)
        yield partial(norm, rows, HEADS, DIM, train)
        yield partial(rotation, rows, train)
        yield partial(routing, rows)
        yield partial(gather_sum, rows)
        yield partial(expert_layer, rows, HIDDEN, INNER, train)
    yield partial(log_probs, TRAIN)
    yield lambda: packed_attention("of the step", step_batch())
    yield partial(cached_attention, "of the step", PROMPTS, PROMPT, RESPONSE // 2)


def sweeps() -> Iterator[Callable[[], Case]]:
    """Around the thresholds. Attention: half of the keys are a shared prompt, or nothing is shared."""
    for keys in (16, 64, 128, 256, 512):
        half = keys // 2
        shared = partial(micro_batch, PACKED_ROWS // (half * (SAMPLES + 1)), SAMPLES, half, [half + 1])
        alone = partial(micro_batch, PACKED_ROWS // keys, 1, 1, [keys])
        yield lambda made=shared: packed_attention("half shared", made())
        yield lambda made=alone: packed_attention("not shared", made())
    for tokens in (64, 128, 256, 512, 1024, 2048, 4096):
        yield partial(cached_attention, "mostly prompt", DECODE_PROMPTS, tokens - 17, 16)
        yield partial(cached_attention, "mostly own", DECODE_PROMPTS, PROMPT, tokens - PROMPT - 1)
    for size in (128, 256, 512):
        yield partial(expert_layer, EXPERT_ROWS, size, size, True)
        if size != HIDDEN:  # that one is a case of the step
            yield partial(expert_layer, DECODE, size, size, False)


def lift_thresholds() -> None:
    """Let the kernels compute every size; the sides without them do not look at these."""
    attention.PACKED_KEYS = attention.DECODED_KEYS = sys.maxsize


def both_ways(step: Step, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The results of ``step``, and with ``grads`` the gradients of ``inputs``."""
    with torch.set_grad_enabled(bool(grads)):
        found = step()
        found = list(found) if isinstance(found, tuple) else [found]
        return [*found, *torch.autograd.grad(found, inputs, grads)] if grads else found


def check(name: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """SystemExit unless both sides computed the same."""
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        a, b = a.detach().double(), b.detach().double()
        error = float((a - b).norm() / a.norm().clamp_min(1e-30))
        if not error < CLOSE:
            raise SystemExit(f"{name}: result {number} of the compiled side is off by {error:.1e} of its norm")


def timed(step: Step, calls: int) -> float:
    """Milliseconds of a call."""
    started = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - started) / calls * 1e3


def compare(name: str, case: Case, grads: Sequence[Tensor], turns: int) -> dict[str, Any]:
    """Turns of both sides, forward or (with ``grads``) forward and backward."""
    sides = [partial(both_ways, step, case.inputs, grads) for step in (case.torch, case.compiled)]
    check(name, *(side() for side in sides))
    calls = 1 + int(TURN * 1e3 / min(timed(side, 2) for side in sides))
    seen = [[timed(side, calls) for side in sides] for _ in range(turns)]
    low, ratio, high = statistics.quantiles((a / b for a, b in seen), n=4)
    medians = (round(statistics.median(values), 4) for values in zip(*seen, strict=True))
    found = dict(zip(("torch_ms", "compiled_ms"), medians, strict=True))
    found |= {"times_faster": round(ratio, 2), "quartiles": [round(low, 2), round(high, 2)]}
    print(f"{ratio:6.2f}  {name}", file=sys.stderr, flush=True)
    return found


def measure(case: Case, turns: int) -> dict[str, dict[str, Any]]:
    """Forward, and forward with backward where there is one."""
    found = {f"{case.name}: forward": ()}
    if case.inputs:
        results = both_ways(case.torch, (), ())
        found[f"{case.name}: forward and backward"] = [torch.randn_like(x) for x in results]
    return {name: compare(name, case, grads, turns) for name, grads in found.items()}


def versions() -> dict[str, str]:
    """Of libraries, and the first line of what the C compiler says it is."""
    command = [*compiler(), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return installed("miles-core", "torch", "transformers") | {"compiler": said[0]}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=25, help="measured turns of each side of a case")
    parser.add_argument("--only", default="", help="only cases with this in their name, such as 'experts 500 rows'")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    library.library()
    lift_thresholds()
    cases: dict[str, dict[str, Any]] = {}
    for make in (*of_the_step(), *sweeps()):
        case = make()
        if chosen.only in case.name:
            cases |= measure(case, chosen.turns)
    slower = [name for name, found in cases.items() if found["times_faster"] < 1]
    result = {"threads": chosen.threads, "turns": chosen.turns, "cases": cases, "slower": slower}
    finish("cpu_kernels", result, chosen.save, versions)


if __name__ == "__main__":
    main()
