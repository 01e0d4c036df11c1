"""One GRPO step with tool calls: miles (``--generate tools``) against TRL's ``environment_factory``, on the same task and machine, taking turns.

A small random Qwen3 learns by heart to call the tool ``look`` and then to answer "done", so every sample of both sides has two answers and one
call; each turn reports what it counted. One environment (miles: one instance of a class) exists per sample. The reward is a random number, so
every group has advantages. ``--delay`` is the time that a call takes, as a search or a sandbox would; TRL calls the environments' methods one
after the other, miles concurrently. Steps are timed as in ``grpo_step.py``, from prompts to the optimizer, and (miles) with weight sync and
metrics. The chat template is TRL's copy of Qwen2.5's, which is read from its installation. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Reporter, Steps, Worker, alternate, finish, installed, medians, options, spread
from benchmarks.training.trl_step import time_method, trl_config
from benchmarks.training.workload import RESPONSE_TOKENS, SAMPLES

#: Tokens of one answer, and of all answers and results of a sample together (TRL's limit).
ANSWER, COMPLETION = 32, 96
CALL, RESULT, DONE = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "3", "done"
TOOLS = '''import random
import time


class Shop:
    """One environment, for both sides."""

    def look(self) -> str:
        """Return the number of visitors."""
        time.sleep(DELAY)
        return "RESULT"


async def reward(args, sample):
    return random.random()
'''


def make_model(directory: Path, template: str, tools: Path, steps: int) -> None:
    """Save a small model with its tokenizer that calls the tool at every question and then answers.

    Args:
        directory: where the checkpoint is written.
        template: the chat template.
        tools: file of the tool.
        steps: steps of training by heart.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([template, CALL, DONE, *map(question, range(100))], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **sizes,
        )
    )
    schemas = describe_tool(tools)
    pairs = [pair for schema in schemas for n in range(16) for pair in conversation(tokenizer, schema, n)]
    memorize(model, pairs, steps)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def question(number: int) -> str:
    """Return the text of a prompt."""
    return f"How many visitors has shop {number}?"


def describe_tool(tools: Path) -> list[dict[str, Any]]:
    """Return the schemas by which miles and Transformers (TRL) describe the tool to the model."""
    from transformers.utils import get_json_schema

    from miles_tool_calls.functions import load_functions

    (ours,) = load_functions((f"{tools}:Shop",))
    theirs: dict[str, Any] = get_json_schema(load_shop(tools).look)
    return [ours.schema, theirs]


def load_shop(tools: Path) -> Any:
    """Return the class in the tool's file."""
    spec = importlib.util.spec_from_file_location("shop", tools)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Shop


def conversation(tokenizer: Any, schema: dict[str, Any], number: int) -> list[tuple[list[int], list[int]]]:
    """Return prompt and answer ids of both answers to a question."""
    asked = [{"role": "user", "content": question(number)}]
    function = {"name": "look", "arguments": {}}
    called = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    found = [{"role": "tool", "name": "look", "content": RESULT}]
    pairs = []
    for messages, answer in ((asked, CALL), ([*asked, *called, *found], DONE)):
        text = tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        pairs.append((prompt, tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)))
    return pairs


def memorize(model: Any, pairs: list[tuple[list[int], list[int]]], steps: int) -> None:
    """Train until the answers are certain.

    Raises:
        SystemExit: they are not after ``steps`` steps.
    """
    import torch
    from torch.nn.functional import cross_entropy

    optimizer, draw, loss = torch.optim.Adam(model.parameters(), 2e-3), random.Random(0), torch.zeros(())
    recent = 1.0
    for _ in range(steps):
        total = torch.zeros(())
        for prompt, answer in draw.sample(pairs, 4):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            total = total + cross_entropy(logits.float(), torch.tensor(answer))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        loss = total.detach() / 4
        recent = 0.9 * recent + 0.1 * float(loss)
        if recent < 5e-4:
            return
    raise SystemExit(f"the model did not learn its calls: loss {float(loss):.4f} after {steps} steps (--memorize)")


# ---- the two sides


def work_with_miles(given: argparse.Namespace, reporter: Reporter) -> None:
    """Run ``miles train``, held before each step."""
    from benchmarks.training.workload import train_in_turns

    turn = Steps(reporter, given.steps_a_turn)
    reporter.send(versions=installed("miles-core", "torch", "transformers"))

    def report(record: dict[str, Any], seconds: float, _: float) -> None:
        turn.report(seconds=seconds, calls=record["tools/calls"], generate=record["time/rollout"])

    flags = f"""--hf-checkpoint {given.checkpoint} --prompt-data {given.prompts} --input-key prompt --apply-chat-template
        --custom-rm-path {given.tools}:reward --generate tools --tools {given.tools}:Shop --tool-turns 3
        --tool-concurrency 256 --device cpu --dtype float32 --rollout-batch-size {given.prompts_a_step} --n-samples-per-prompt {SAMPLES}
        --num-rollout {given.steps} --rollout-max-response-len {ANSWER} --max-running-requests {given.prompts_a_step * SAMPLES}
        --lr 1e-6 --weight-decay 0 --adam-beta2 0.999 --clip-grad 1.0 --eps-clip 0.2 --loss-aggregation token_mean
        --use-dynamic-batch-size --max-tokens-per-gpu 65536 --seed 0 --no-self-check --log-level warning"""
    train_in_turns(flags.split(), turn.wait, report)


def work_with_trl(given: argparse.Namespace, reporter: Reporter) -> None:
    """Run ``GRPOTrainer.train`` with an environment per sample, held between two steps."""
    import pyarrow
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    turn, calls = Steps(reporter, given.steps_a_turn), [0]
    phases = {"generate": 0.0}

    class Environment(load_shop(Path(given.tools))):  # type: ignore[misc]
        def reset(self, **_: Any) -> None:
            """Start an episode."""

        def look(self) -> str:
            """Return the number of visitors."""
            calls[0] += 1
            return str(super().look())

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [random.random() for _ in completions]

    class Held(TrainerCallback):
        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turn.wait()
            Held.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = time.perf_counter() - Held.started
            turn.report(seconds=seconds, calls=calls[0] / given.trl_batch, **phases)
            calls[0], phases["generate"] = 0, 0.0
            turn.wait()
            Held.started = time.perf_counter()

    time_method(GRPOTrainer, "_generate", "generate", phases, given)
    rows = [json.loads(line)["prompt"] for line in Path(given.prompts).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as directory:
        config = trl_config(directory, given)
        config.max_completion_length, config.max_tool_calling_iterations = COMPLETION, 2
        trainer = GRPOTrainer(
            given.checkpoint,
            reward,
            args=config,
            train_dataset=Dataset(pyarrow.table({"prompt": rows}), fingerprint="prompts"),
            processing_class=AutoTokenizer.from_pretrained(given.checkpoint, padding_side="left"),
            callbacks=[Held()],
            environment_factory=Environment,
        )
        reporter.send(versions=installed("trl", "torch", "transformers"))
        trainer.train()


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Take turns between TRL and miles."""
    code = (
        "import pathlib, trl; print((pathlib.Path(trl.__file__).parent / 'chat_templates/qwen2_5.jinja').read_text())"
    )
    found = subprocess.run([given.trl_python, "-c", code], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        source = TOOLS.replace("DELAY", str(given.delay)).replace("RESULT", RESULT)
        (directory / "shop.py").write_text(source)
        make_model(directory / "model", found.stdout.removesuffix("\n"), directory / "shop.py", given.memorize)
        row = [json.dumps({"prompt": [{"role": "user", "content": question(n % 16)}]}) for n in range(512)]
        (directory / "prompts.jsonl").write_text("\n".join(row) + "\n")
        steps = (given.warm_up + given.turns) * (given.steps_a_turn + 1) + 1
        common = [
            str(Path(__file__).resolve()),
            "--checkpoint",
            f"{directory}/model",
            "--prompts",
            f"{directory}/prompts.jsonl",
        ]
        common += ["--tools", f"{directory}/shop.py", "--steps", str(steps), "--steps-a-turn", str(given.steps_a_turn)]
        common += ["--prompts-a-step", str(given.prompts_a_step)]
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        workers = [
            Worker("miles", [sys.executable, *common, "--worker", "miles"], given.threads),
            Worker("trl", [given.trl_python, *common, "--worker", "trl"], given.threads),
        ]
        try:
            reports = alternate(workers, given.turns, given.warm_up)
        finally:
            for worker in workers:
                worker.close()
    sides = {side: medians(r) | {"range": spread(r)} for side, r in reports.items()}
    if not all(0.95 < numbers["calls"] < 1.05 for numbers in sides.values()):
        raise SystemExit(f"the sides did not do the same work: {sides}")
    workload = {name: getattr(given, name) for name in ("prompts_a_step", "delay", "threads", "turns", "steps_a_turn")}
    return {
        "workload": workload | {"samples": SAMPLES, "answers_per_sample": 2},
        "sides": sides,
        "times_faster_than_trl": round(sides["trl"]["seconds"] / sides["miles"]["seconds"], 2),
        "worker_versions": {worker.name: worker.hello["versions"] for worker in workers},
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=8, help="measured turns of each side")
    parser.add_argument("--warm-up", type=int, default=1, help="unmeasured turns of each side")
    parser.add_argument("--steps-a-turn", type=int, default=1, help="counted steps of a turn, after one that is not")
    parser.add_argument("--prompts-a-step", type=int, default=16)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that a call takes")
    parser.add_argument(
        "--memorize", type=int, default=1500, help="maximum steps in which the model learns its answers"
    )
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has trl installed")
    parser.add_argument("--variant", default="", help="part of the result file's name, such as the delay")
    for name in ("--worker", "--checkpoint", "--prompts", "--tools"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.trl_batch, given.tokens = given.prompts_a_step * SAMPLES, RESPONSE_TOKENS
    given.gpu, given.model, given.trl_experts = "", "tool caller", ""
    if given.worker == "miles":
        work_with_miles(given, Reporter())
    elif given.worker == "trl":
        work_with_trl(given, Reporter())
    else:
        finish("agents_step", compare(given), given.save, lambda: installed("miles-core"), given.variant)


if __name__ == "__main__":
    main()
