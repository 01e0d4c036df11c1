"""What training on several ranks costs: FSDP2 and replicas against one process that has all samples.

Strong scaling of one optimiser step of the trainer (old log-probs, forward, backward, AdamW): the same samples, all on one rank or
divided among several. Ranks are processes of their own; on GPUs each has one (NCCL), on a CPU they share the cores with
``--threads`` each (gloo), so two of them are not twice as fast there. Configurations take turns, in an order that changes. Memory
is the peak of a rank: allocated on a GPU; on a CPU, bytes of weights, gradients and optimiser that it keeps. Without ``--model``
the model is a random dense one of the given size. The last line is one JSON object.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import finish, installed, options

STRATEGIES = ("full_shard", "no_shard")


def make_model(directory: Path, hidden: int, layers: int, vocabulary: int) -> Path:
    """A random Llama."""
    from miles_testing.tiny import tiny_checkpoint

    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "vocab_size": vocabulary}
    return tiny_checkpoint("llama", directory, **sizes, **heads)


def make_batch(given: Any, vocabulary: int) -> Any:
    """Groups of samples with the columns that a policy loss reads."""
    import numpy as np
    import torch

    from miles_core.data.batch import collate
    from miles_core.data.sample import Sample

    random, samples = np.random.default_rng(0), []
    for group in range(given.groups):
        prompt = random.integers(2, vocabulary, given.prompt).tolist()
        for _ in range(given.samples):
            tokens = prompt + random.integers(2, vocabulary, given.response).tolist()
            samples.append(Sample(tokens=tokens, response_length=given.response, group_index=group, index=len(samples)))
    batch = collate(samples)
    batch.columns["weight"] = torch.from_numpy(random.normal(size=len(batch.tokens))).float() / len(batch.tokens)
    return batch


def loss(output: Any, micro: Any, ctx: Any) -> Any:
    """Sum of column ``weight`` times log-prob: the work of any policy loss."""
    from miles_core.contracts.trainer import Loss

    return Loss((output.log_probs * micro.column("weight").to(output.log_probs.device)).sum())


def make_trainer(given: Any, checkpoint: Path, strategy: str, device: Any) -> Any:
    """A bound trainer of this rank."""
    from miles_core.contracts.trainer import Callbacks
    from miles_core.train.optimizer import OptimizerConfig
    from miles_embedded.model.load import load_model
    from miles_embedded.trainer.build import data_parallel
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

    config = TrainerConfig(OptimizerConfig(lr=1e-5), micro_batch_size=given.micro_batch_size, recompute=given.recompute)
    model = load_model(checkpoint, "bfloat16" if device.type == "cuda" else "float32", device)
    trainer = EmbeddedTrainer(model, config, parallel=data_parallel(strategy, device))
    trainer.bind(Callbacks(trainer.forward, loss, trainer.optimizer_step))
    return trainer


def stored_bytes(trainer: Any) -> int:
    """Bytes of weights, gradients (as large as the masters) and optimiser that this rank keeps."""
    from miles_embedded.model.storage import local_shard
    from miles_embedded.model.views import sources

    weights = sum(local_shard(t).tensor.nbytes for t in sources(trainer.model).values())
    gradients = sum(master.nbytes for master in trainer.optimizer.masters.values())
    return weights + gradients + sum(t.nbytes for t in trainer.optimizer.tensors().values())


def turn(trainer: Any, batch: Any, device: Any) -> dict[str, float]:
    """One step: its seconds, the peak of memory meanwhile and the gradient's norm."""
    import torch

    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    trainer.sum(torch.zeros(1))  # ranks start together
    started = time.perf_counter()
    trainer.log_probs(batch, "old")
    metrics = trainer.step(batch)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    memory = torch.cuda.max_memory_allocated(device) if cuda else stored_bytes(trainer)
    return {"seconds": seconds, "bytes": float(memory), "grad_norm": metrics["train/grad_norm"][0]}


def rank_main(rank: int, size: int, strategy: str, given: Any, checkpoint: Path, meeting: str, answers: Any) -> None:
    """Run one rank of one configuration: one turn per request."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig

    torch.set_num_threads(given.threads)
    cuda = given.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size > 1:
        os.environ["LOCAL_RANK"] = str(rank)
        if not cuda and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("nccl" if cuda else "gloo", f"file://{meeting}", rank=rank, world_size=size)
    trainer = make_trainer(given, checkpoint, strategy, device)
    batch = make_batch(given, AutoConfig.from_pretrained(checkpoint).vocab_size)
    groups = [g for g in range(given.groups) if g % size == rank]
    mine = batch.select([i for i, g in enumerate(batch.group.tolist()) if g in groups])
    answers.send(None)
    while answers.recv():
        answers.send(turn(trainer, mine, device))
    if size > 1:
        dist.destroy_process_group()


class Configuration:
    """Ranks that wait for their turns."""

    def __init__(self, name: str, size: int, strategy: str, given: Any, checkpoint: Path, meeting: Path) -> None:
        import multiprocessing

        self.name, self.pipes, self.processes = name, [], []
        context = multiprocessing.get_context("spawn")
        for rank in range(size):
            mine, theirs = context.Pipe()
            arguments = (rank, size, strategy, given, checkpoint, str(meeting), theirs)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def turn(self) -> dict[str, float]:
        """The slowest and the largest rank."""
        for pipe in self.pipes:
            pipe.send(True)
        found = [pipe.recv() for pipe in self.pipes]
        return {name: max(f[name] for f in found) for name in found[0]}

    def close(self) -> None:
        """End the ranks, which leave their group together."""
        for pipe in self.pipes:
            pipe.send(False)
        for process in self.processes:
            process.join(30)
            process.kill()


def turns(configurations: list[Configuration], count: int, warm_up: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Turns of all, every second one in the reverse order."""
    for number in range(-warm_up, count):
        order = configurations if number % 2 else configurations[::-1]
        yield number, {each.name: each.turn() for each in order}
        print(f"turn {number + 1} of {count}", file=sys.stderr, flush=True)


def measure(given: Any) -> dict[str, Any]:
    """Each configuration's medians, and what they are relative to one rank."""
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        checkpoint = Path(given.model) if given.model else make_model(here / "model", given.hidden, given.layers, 4096)
        names = {"1 rank": (1, "full_shard")} | {f"{given.ranks} ranks, {s}": (given.ranks, s) for s in STRATEGIES}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        # On a GPU the configurations would share its memory, so each is measured by itself.
        for together in [[name] for name in names] if given.device == "cuda" else [list(names)]:
            started = [
                Configuration(name, *names[name], given, checkpoint, here / f"group-{list(names).index(name)}")
                for name in together
            ]
            try:
                for number, reports in turns(started, given.turns, given.warm_up):
                    for name, report in reports.items():
                        if number >= 0:
                            found[name].append(report)
            finally:
                for each in started:
                    each.close()
    return summary(found, given)


def summary(found: dict[str, list[dict[str, float]]], given: Any) -> dict[str, Any]:
    """The JSON object's own part."""
    one = {key: statistics.median(r[key] for r in found["1 rank"]) for key in ("seconds", "bytes")}
    first = found["1 rank"][0]["grad_norm"]
    configurations = {}
    for name, reports in found.items():
        seconds = [r["seconds"] for r in reports]
        memory = statistics.median(r["bytes"] for r in reports)
        configurations[name] = {
            "seconds": round(statistics.median(seconds), 4),
            "range": [round(min(seconds), 4), round(max(seconds), 4)],
            "seconds_to_one_rank": round(statistics.median(seconds) / one["seconds"], 3),
            "megabytes_a_rank": round(memory / 1e6, 1),
            "memory_to_one_rank": round(memory / one["bytes"], 3),
            "grad_norm_off_by": round(abs(reports[0]["grad_norm"] / first - 1), 6),
        }
    asked = {
        name: getattr(given, name)
        for name in (
            "device",
            "ranks",
            "threads",
            "groups",
            "samples",
            "prompt",
            "response",
            "micro_batch_size",
            "recompute",
        )
    }
    model = Path(given.model).name if given.model else f"random Llama, {given.layers} layers of {given.hidden}"
    return {**asked, "model": model, "turns": given.turns, "configurations": configurations}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU a rank, NCCL")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the divided configurations")
    parser.add_argument("--model", help="a Hugging Face checkpoint in place of a random model")
    parser.add_argument("--hidden", type=int, default=256, help="width of the random model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="its layers")
    parser.add_argument("--groups", type=int, default=8, help="prompts a step")
    parser.add_argument("--samples", type=int, default=4, help="samples a prompt")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples a micro-batch")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--turns", type=int, default=9, help="measured steps of each configuration")
    parser.add_argument("--warm-up", type=int, default=2, help="unmeasured steps of each")
    given = parser.parse_args()
    variant = given.device if given.device == "cuda" else ""
    finish("fsdp", measure(given), given.save, lambda: installed("miles-core", "torch", "transformers"), variant)


if __name__ == "__main__":
    main()
