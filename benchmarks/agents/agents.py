"""Third-party agents against the endpoint: are exactly the engine's tokens trained, with log-probs of exactly their context?

Runs agents of openai-agents (responses and chat completions), langgraph and smolagents, as their libraries are, against sessions whose engine
is a double: it writes calls, reasoning and code whose text is divided into tokens otherwise than the tokenizer would, and its log-probs
are a hash of the whole prefix, so a log-prob that is recorded with any other context or position is found. A fresh pass computes every
log-prob again from the sample's tokens. With ``--checkpoint`` the embedded engine runs a real model for the same agents, in a training run of one
step each, and the fresh pass is the trainer's: ``mismatch/abs_log_prob``.

The agents need an interpreter with their libraries: ``--python``. The tokenizer is that of ``--tokenizer``, with a template that has
tools (like Qwen2.5's) or also removes earlier reasoning (like Qwen3's, ``--template strips``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.measure import finish, installed, options
from miles_core.data import Renderer, Sample
from miles_core.engine import Response, Sampling
from miles_core.plugin import GenerationClient
from miles_endpoint.answer import AnswerReader
from miles_endpoint.server import Server
from miles_endpoint.service import Models
from miles_endpoint.session import Limits, Session
from miles_endpoint.testing import CHATML, STRIPS
from miles_testing import toy_run

AGENTS = ("openai-agents", "openai-agents-chat", "langgraph", "smolagents")
LIBRARIES = ("openai", "openai-agents", "langgraph", "langchain-openai", "smolagents")
NOTES = ("", "naïve café", "x  y", 'say \\"hi\\"', "\\u00e9", "日本語", "tab\\there", "a/b", "1e-5", " lead")


def log_prob(prefix: list[int], token: int) -> float:
    """The double's log-prob of a token: a hash of everything before it."""
    return -(zlib.crc32(repr((prefix, token)).encode()) % 100_000) / 20_000


class Script:
    """Writes the answers of one sample."""

    def __init__(self, agent: str, number: int, tokenizer: Any) -> None:
        self.random, self.agent, self.tokenizer = random.Random(number), agent, tokenizer
        self.left = self.random.randint(1, 3)

    def text(self) -> str:
        draw = self.random
        self.left -= 1
        if self.agent == "smolagents":
            code = (
                f"x = {draw.randint(1, 99)} + {draw.randint(1, 99)}\nprint(x)" if self.left > 0 else "final_answer(3)"
            )
            return f"{draw.choice(('', ' ', 'Thought: '))}I compute it.{draw.choice(('', ' ', chr(10)))}\n<code>\n{code}\n</code>"
        reasoning = f"<think>\n{draw.choice(NOTES)} hm\n</think>\n\n" if draw.random() < 0.5 else ""
        if self.left < 0:
            self.left = self.random.randint(0, 2)
            return f"{reasoning}It is {draw.randint(1, 99)}.{draw.choice(('', ' ', chr(10)))}<|im_end|>"
        return reasoning + "\n".join(self._call() for _ in range(draw.choice((1, 1, 2)))) + "<|im_end|>"

    def _call(self) -> str:
        draw = self.random
        note = draw.choice(NOTES)
        colon, comma = draw.choice(((": ", ", "), (":", ","), (" : ", " ,")))
        parts = [
            f'"a"{colon}{draw.randint(0, 99)}',
            f'"b"{colon}{draw.randint(0, 99)}',
            f'"note"{colon}"{note}"',
            f'"exact"{colon}{draw.choice(("true", "false"))}',
        ]
        draw.shuffle(parts)
        return f'<tool_call>\n{{"name"{colon}"add"{comma}"arguments"{colon}{{{comma.join(parts)}}}}}\n</tool_call>'

    def tokens(self) -> list[int]:
        """The answer, divided into tokens at random places."""
        text, ids = self.text(), []
        while text:
            special = next((s for s in ("<|im_end|>", "<think>", "</think>") if text.startswith(s)), "")
            size = len(special) or self.random.choice((1, 2, 3, 5, 8))
            cut = text.find("<", 1, size) if not special else -1
            piece = special or text[: cut if cut > 0 else size]
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
            text = text[len(piece) :]
        return ids


class Checked:
    """One sample's session, and the check of its samples."""

    def __init__(self, agent: str, number: int, tokenizer: Any, renderer: Renderer, generate: Any = None) -> None:
        self.script, self.tokenizer, self.sample = (
            Script(agent, number, tokenizer),
            tokenizer,
            Sample(index=number, tokens=[1], policy="policy"),
        )
        ask = GenerationClient(
            self.sample, "policy", generate or self._generate, Sampling(400), tokenizer, renderer,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )  # fmt: skip
        self.session = Session(ask, AnswerReader(renderer), Limits())
        self.responses: list[tuple[list[int], Response]] = []

    async def _generate(self, tokens: list[int], sampling: Sampling, policy: str, media: Any = ()) -> Response:
        await asyncio.sleep(0)
        prefix, ids, values = list(tokens), [], []
        for token in self.script.tokens():
            values.append(log_prob(prefix, token))
            prefix.append(token)
            ids.append(token)
        response = Response(ids, values, "stop", self.tokenizer.decode(ids, skip_special_tokens=True), [(0, 1)])
        self.responses.append((list(tokens), response))
        return response

    def check(self, counts: Counter[str], score: Any = None) -> None:
        """Add what is wrong to ``counts``."""
        transcript = self.session.ask.transcript
        samples = transcript.samples(self.sample) if transcript.turns else []
        trained = 0
        for one in samples:
            transcript.fill(one, ())
            one.validate()
            trained += sum(one.mask)
            for i, (value, mask) in enumerate(zip(one.rollout_log_probs or (), one.mask, strict=True)):
                at = one.prompt_length + i
                counts["wrong_log_probs"] += bool(mask) and value != log_prob(one.tokens[:at], one.tokens[at])
        for turn in transcript.turns:
            counts["re_tokenized"] += turn.tokens[: turn.start] not in [tokens for tokens, _ in self.responses]
            text = self.tokenizer.decode(list(turn.response.tokens))
            counts["drifting_answers"] += self.tokenizer.encode(text, add_special_tokens=False) != turn.response.tokens
        generated = sum(len(turn.response.tokens) for turn in transcript.turns if not turn.discarded)
        counts["trained_tokens"] += trained
        counts["missing_tokens"] += generated - trained
        counts["turns"] += len(transcript.turns)
        counts["samples"] += len(samples)
        counts["prompt_tokens"] += sum(len(one.tokens) - sum(one.mask) for one in samples)
        for name, value in self.session.counts.items():
            counts[name] += value


async def run_agent(agent: str, given: Any, tokenizer: Any, renderer: Renderer, first: int) -> Counter[str]:
    """Run one library's agent for all its samples and return the counts."""
    server = Server(Models({"default": ""}), "127.0.0.1", 0, 2**25)
    await server.start()
    counts: Counter[str] = Counter()
    process = await asyncio.create_subprocess_exec(
        given.python, "-P", str(Path(__file__).with_name("agent_programs.py")), agent,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=None if given.verbose else asyncio.subprocess.DEVNULL,
        limit=2**20,
    )  # fmt: skip
    assert process.stdin and process.stdout
    open_: dict[int, tuple[Checked, str]] = {}
    for number in range(first, first + given.transcripts):
        checked = Checked(agent, number, tokenizer, renderer)
        token = server.open(checked.session)
        open_[number] = (checked, token)
        task = {"base_url": server.url, "api_key": token, "question": f"What is {number} + 5?", "number": number}
        process.stdin.write(json.dumps(task).encode() + b"\n")
    process.stdin.close()
    while line := await process.stdout.readline():
        done = json.loads(line)
        checked, token = open_.pop(done["number"])
        await server.close(token)
        checked.check(counts)
        counts["transcripts"] += 1
        if "error" in done:
            counts["agent_errors"] += 1
            print(agent, done["error"], flush=True)
        if counts["transcripts"] % 50 == 0:
            print(agent, dict(counts), flush=True)
    await process.wait()
    await server.stop()
    return counts


def run_model(agent: str, given: Any) -> dict[str, float]:
    """Train one step with one library's agent on a real model; return what the run measured."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        shutil.copytree(given.checkpoint, model)
        (model / "chat_template.jinja").write_text({"chatml": CHATML, "strips": STRIPS}[given.template])
        rows = [json.dumps({"input": f"What is {i} + 5?"}) for i in range(8)]
        (Path(directory) / "prompts.jsonl").write_text("\n".join(rows))
        program = Path(__file__).with_name("agent_programs.py")
        run = toy_run(
            ["endpoint"], f"{directory}/run", 1, hf_checkpoint=model, prompt_data=f"{directory}/prompts.jsonl", custom_rm_path=None,
            generate="endpoint", agent=f"{given.python} -P {program} {agent} --one", rm_type="agent", agent_timeout=600, agent_max_turns=8,
            rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_response_len=given.max_tokens, rollout_max_context_len=4096,
            dtype="float32", log_level="info",  # smolagents begins with 2,302 tokens
        )  # fmt: skip
    kept = (
        "mismatch/abs_log_prob",
        "rollout/turns",
        "rollout/samples",
        "rollout/failed",
        "endpoint/tool_calls",
        "endpoint/branches",
    )
    return {name: run.metrics[0][name] for name in kept}


def read_tokenizer(path: Path) -> Any:
    """Read a tokenizer (a checkpoint's directory, or a tokenizer.json); add the special tokens of the templates."""
    if path.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(path)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), clean_up_tokenization_spaces=False)
    missing = [
        t
        for t in ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
        if len(tokenizer.encode(t, add_special_tokens=False)) > 1
    ]
    if missing:
        tokenizer.add_special_tokens({"extra_special_tokens": missing}, replace_extra_special_tokens=False)
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def read_versions(python: str) -> dict[str, str]:
    """Versions of the libraries here, and of the agents' in their interpreter."""
    program = f"import json\nfrom importlib.metadata import version\nprint(json.dumps({{n: version(n) for n in {LIBRARIES}}}))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return installed("miles-core", "uvicorn", "transformers", "tokenizers") | json.loads(done.stdout)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__)
    parser.add_argument("--tokenizer", help="a checkpoint's directory, or a tokenizer.json")
    parser.add_argument("--tokenizer-name", default="", help="name in the result and in its file's name")
    parser.add_argument("--template", choices=("chatml", "strips"), default="chatml")
    parser.add_argument("--python", required=True, help="interpreter with the agents' libraries")
    parser.add_argument("--agents", default=",".join(AGENTS))
    parser.add_argument("--transcripts", type=int, default=250, help="per agent")
    parser.add_argument("--checkpoint", help="a model with the special tokens of the template; instead of the double")
    parser.add_argument("--max-tokens", type=int, default=64, help="with --checkpoint: tokens per answer")
    parser.add_argument("--verbose", action="store_true", help="show the agents' own output")
    given = parser.parse_args()
    if not (given.checkpoint or given.tokenizer):
        parser.error("give --tokenizer or --checkpoint")
    return given


def main() -> None:
    given = parse()
    if given.checkpoint:
        models = {}
        for agent in given.agents.split(","):
            models[agent] = run_model(agent, given)
            print(agent, models[agent], flush=True)
        finish(
            "agents",
            {"checkpoint": Path(given.checkpoint).name, "agents": models},
            given.save,
            lambda: read_versions(given.python),
            f"model-{given.template}",
        )
        return
    tokenizer = read_tokenizer(Path(given.tokenizer))
    tokenizer.chat_template = {"chatml": CHATML, "strips": STRIPS}[given.template]
    renderer = Renderer(tokenizer)
    started, found = time.perf_counter(), {}
    for i, agent in enumerate(given.agents.split(",")):
        counts = asyncio.run(run_agent(agent, given, tokenizer, renderer, 10_000 * i))
        found[agent] = {name: counts[name] for name in sorted(counts)}
        print(agent, json.dumps(found[agent]), flush=True)
    sums = {
        name: sum(counts.get(name, 0) for counts in found.values())
        for name in (
            "transcripts", "turns", "trained_tokens", "drifting_answers", "re_tokenized", "wrong_log_probs", "missing_tokens",
        )
    }  # fmt: skip
    variant = "-".join(filter(None, (given.tokenizer_name, given.template)))
    result = {
        "tokenizer": given.tokenizer_name or Path(given.tokenizer).name,
        "template": given.template,
        "vocabulary": len(tokenizer),
        "agents": found,
        **sums,
        "seconds": round(time.perf_counter() - started, 1),
    }
    finish("agents", result, given.save, lambda: read_versions(given.python), variant)


if __name__ == "__main__":
    main()
