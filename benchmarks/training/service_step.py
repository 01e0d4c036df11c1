"""One GRPO step through ``miles serve`` with the package ``tinker`` as the client, against the same step of ``miles train``: same checkpoint,
prompts, reward, adapters and machine, taking turns.

8 prompts x 8 samples, at most 64 new tokens, FP32, adapters of rank 8 on all linear layers, one optimiser step. The client saves the weights for
a sampler, samples, computes rewards and advantages, calls ``forward_backward`` and ``optim_step``, and waits for both. Tokens per second are
sampled tokens per second of a step, and per second of processor time of all processes of a side, which other work on the machine affects less.
``call`` is the time of ``forward_backward`` on one datum of 8 tokens, through HTTP and in one process.

Needs ``tinker`` in ``--client-python``. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Reporter, Steps, Worker, alternate, finish, installed, medians, options, spread

PROMPTS, SAMPLES, TOKENS, LR = 8, 8, 64, 1e-5
CALLS = 50


def run_options(checkpoint: str) -> list[str]:
    """Options that both sides have."""
    return f"""--hf-checkpoint {checkpoint} --device cpu --dtype float32 --plugins lora --lora-sync adapter --lora-rank 8
        --lora-target-modules all-linear --log-level warning --use-dynamic-batch-size --max-tokens-per-gpu 16384""".split()


def work_with_train(given: argparse.Namespace, reporter: Reporter) -> None:
    """Run ``miles train``, held before each step."""
    from benchmarks.training.workload import train_in_turns

    turn = Steps(reporter, given.steps_a_turn)
    reporter.send()

    def report(record: dict[str, Any], seconds: float, cpu: float) -> None:
        turn.report(seconds=seconds, cpu=cpu, tokens=record["rollout/tokens"])

    flags = f"""--prompt-data {given.prompts} --input-key prompt --label-key label --custom-rm-path
        {Path(__file__).with_name("workload.py")}:rm_odd --rollout-batch-size {PROMPTS} --n-samples-per-prompt {SAMPLES} --num-rollout
        {given.steps} --rollout-max-response-len {TOKENS} --lr {LR}""".split()
    train_in_turns([*run_options(given.checkpoint), *flags], turn.wait, report)


def work_with_service(given: argparse.Namespace, reporter: Reporter) -> None:
    """Train through a server, with the package tinker."""
    import json

    import tinker

    texts = [json.loads(line)["prompt"] for line in Path(given.prompts).read_text().splitlines()]
    service = tinker.ServiceClient(base_url=given.url, api_key="tml-benchmark")
    training = service.create_lora_training_client(base_model=given.checkpoint, rank=8).result()
    tokenizer = training.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in texts]
    datum = make_datum(tinker, [5, 6, 7, 8], [9, 10, 11, 12, 13], [-1.0] * 5, 1.0)
    calls = []
    for _ in range(CALLS):
        started = time.perf_counter()
        training.forward_backward([datum], "ppo").result()
        calls.append(time.perf_counter() - started)
    reporter.send(call=statistics.median(calls))
    turn, params = Steps(reporter, given.steps_a_turn), tinker.types.SamplingParams(max_tokens=TOKENS)
    for step in range(given.steps):
        turn.wait()
        started, cpu, tokens, data = time.perf_counter(), cpu_seconds(given.server), 0, []
        sampler = training.save_weights_and_get_sampling_client().result()
        own = [prompts[(step * PROMPTS + i) % len(prompts)] for i in range(PROMPTS)]
        futures = [sampler.sample(tinker.types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in own]
        for prompt, future in zip(own, futures, strict=True):
            sequences = future.result().sequences
            rewards = [sum(token % 2 for token in each.tokens) / len(each.tokens) for each in sequences]
            tokens += sum(len(each.tokens) for each in sequences)
            mean = statistics.fmean(rewards)
            data += [
                make_datum(tinker, prompt, each.tokens, each.logprobs, (reward - mean) / len(each.tokens) / 64)
                for each, reward in zip(sequences, rewards, strict=True)
            ]
        gradients = training.forward_backward(data, "ppo")
        stepped = training.optim_step(tinker.types.AdamParams(learning_rate=LR))
        gradients.result()
        stepped.result()
        turn.report(seconds=time.perf_counter() - started, cpu=cpu_seconds(given.server) - cpu, tokens=tokens)


def cpu_seconds(server: int) -> float:
    """Return the processor time of this process and of the server."""
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_datum(tinker: Any, prompt: list[int], tokens: list[int], log_probs: list[float], advantage: float) -> Any:
    """Make the training data of one response."""
    before = len(prompt) - 1
    inputs = {
        "target_tokens": [0] * before + tokens,
        "logprobs": [0.0] * before + log_probs,
        "advantages": [0.0] * before + [advantage] * len(tokens),
    }
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(prompt + tokens[:-1]), loss_fn_inputs=inputs
    )


async def time_primitive(checkpoint: str, directory: str) -> float:
    """Return the median seconds of ``forward_backward`` on one sample in this process."""
    from miles_core.api import open_run
    from miles_core.data import Sample

    plugins = {"plugins": ["lora"], "lora_sync": "adapter", "lora_target_modules": "all-linear"}
    calls = []
    async with open_run(hf_checkpoint=checkpoint, save=directory, device="cpu", log_level="warning", **plugins) as run:
        for _ in range(CALLS):
            sample = Sample(tokens=[*range(5, 14)], response_length=5)
            sample.fields = {"advantages": [1.0] * 5, "old_log_probs": [-1.0] * 5}
            started = time.perf_counter()
            await run.policies["policy"].forward_backward([sample], "ppo")
            calls.append(time.perf_counter() - started)
    return statistics.median(calls)


def take_turns(given: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Run both sides alternately; returns the reports of each side, and the seconds of a call through the service and in one process."""
    from benchmarks.training.workload import make_workload
    from miles_tools.demo.model import BENCHMARK

    size = replace(BENCHMARK, hidden=given.hidden, layers=given.layers, expert_hidden=given.hidden)
    workload = make_workload(directory, size=size)
    checkpoint = str(workload.checkpoint)
    environment = os.environ | {"MILES_SERVE_TOKEN": "tml-benchmark", "OMP_NUM_THREADS": str(given.threads)}
    save = f"--save={directory}/serve"
    command = [sys.executable, "-m", "miles_core", "serve", "--port=0", *run_options(checkpoint), save]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    lines = [server.stdout.readline() for _ in range(3)]
    url = lines[1].partition("=")[2].strip()
    steps = (given.turns + given.warm_up) * (given.steps_a_turn + 1)
    words = [f"--checkpoint={checkpoint}", f"--prompts={workload.prompt_file}", f"--steps={steps}", f"--url={url}"]
    words += [f"--steps-a-turn={given.steps_a_turn}", f"--server={server.pid}"]
    module = ["-m", "benchmarks.training.service_step"]
    workers = [
        Worker("train", [sys.executable, *module, "--worker=train", *words], given.threads),
        Worker("service", [given.client_python, *module, "--worker=service", *words], given.threads),
    ]
    reports = alternate(workers, given.turns, given.warm_up)
    call = workers[1].hello["call"]
    for worker in workers:
        worker.close()
    server.send_signal(signal.SIGTERM)
    server.wait(60)
    primitive = asyncio.run(time_primitive(checkpoint, f"{directory}/primitive"))
    return reports, {"service": call, "in_process": primitive}


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Compare the tokens per second of both sides."""
    with tempfile.TemporaryDirectory() as name:
        reports, calls = take_turns(given, Path(name))
    speeds = {side: [each["tokens"] / each["seconds"] for each in found] for side, found in reports.items()}
    ratios = [service / train for service, train in zip(speeds["service"], speeds["train"], strict=True)]
    return {
        "model": {"hidden": given.hidden, "layers": given.layers},
        "samples": PROMPTS * SAMPLES,
        "tokens_per_second": {side: round(statistics.median(found), 1) for side, found in speeds.items()},
        "service_to_train": round(statistics.median(ratios), 3),
        "tokens_per_cpu_second": {
            side: round(statistics.median(each["tokens"] / each["cpu"] for each in found), 1)
            for side, found in reports.items()
        },
        "ratios": [round(ratio, 3) for ratio in ratios],
        "step": {side: medians(found) | {"range": spread(found)} for side, found in reports.items()},
        "call_ms": {side: round(seconds * 1e3, 2) for side, seconds in calls.items()},
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the model and of its experts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=9, help="measured turns of each side")
    parser.add_argument("--warm-up", type=int, default=1, help="unmeasured turns of each side")
    parser.add_argument("--steps-a-turn", type=int, default=3, help="counted steps of a turn, after one that is not")
    parser.add_argument("--client-python", default=sys.executable, help="an interpreter that has tinker installed")
    for name in ("--worker", "--checkpoint", "--prompts", "--url"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--server", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker == "train":
        work_with_train(given, Reporter())
    elif given.worker == "service":
        work_with_service(given, Reporter())
    else:
        finish(
            "service_step",
            compare(given),
            given.save,
            lambda: installed("miles-core", "torch"),
            f"{given.hidden}-hidden",
        )


if __name__ == "__main__":
    main()
