"""Does ``miles verify --budget --url`` name the cause of a gap of a real server on a CPU, and none of a sound one?

    python benchmarks/mismatch/real_servers.py --server sglang --save
    python benchmarks/mismatch/real_servers.py --server vllm --python VENV/bin/python --save

Each fault has its own server with a tiny random model. A fault is planted with the server's own options, in a copy of the checkpoint that it
serves, or (SGLang) in its schedulers (``sglang_planted``). ``--python`` is the interpreter with the server, if it is another one. A server
starts in about half a minute. Results are saved after every server. The exit code is 1 if a cause was not named first, or if a sound server has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import ROOT, finish, installed, options
from benchmarks.mismatch.server_causes import COLD, call_verify, make_checkpoint, other_layer, rounded
from miles_fp8.format import Fp8
from miles_int4.format import Int4

#: Seconds until a server must answer.
START = 400.0
_SGLANG = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--max-total-tokens", "8192", "--mem-fraction-static", "0.3"),
    *("--disable-overlap-schedule", "--max-running-requests", "32"),
)
_VLLM = ("--enforce-eager", "--max-num-seqs", "32", "--max-model-len", "512", "--logprobs-mode", "processed_logprobs")
_HEADS = {"head_dim": 64}


@dataclass(frozen=True)
class Fault:
    """A server, sound or with a fault.

    Attributes:
        name: description. expected: part of the first cause to be named; "" for a sound server.
        family, sizes: the model. change: changes the served copy of the model. entries: of the copy's generation_config.json.
        config: entries of config.json that the server overrides. server: further options of the server. variables: its environment.
        words: options of the command.
    """

    name: str
    expected: str
    family: str = "qwen3"
    sizes: Mapping[str, Any] = field(default_factory=lambda: _HEADS)
    change: Callable[[Any], None] | None = None
    entries: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    server: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()


_WINDOW = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1, **_HEADS}
_CAPPED = {
    **{"final_logit_softcapping": 1.0, "attn_logit_softcapping": None, "query_pre_attn_scalar": 64},
    **{"tie_word_embeddings": True, **_HEADS},
}
_SAMPLED = {"do_sample": True}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **_HEADS}
_OTHER_ROPE = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
#: Faults of every server.
COMMON = (
    Fault("sound", ""),
    Fault("sound qwen3_moe", "", "qwen3_moe"),
    Fault("sound llama", "", "llama", {}),
    Fault("weights in FP8", "weights rounded to FP8", change=rounded(Fp8())),
    Fault("weights in INT4", "weights rounded to INT4", change=rounded(Int4())),
    Fault("one layer of other weights", "other weights", change=other_layer),
    Fault("KV cache in FP8", "KV cache in float8_e4m3fn", server=("--kv-cache-dtype", "fp8_e4m3")),
    Fault("rope theta of the default", "rope theta 10000", sizes=_ROPE, config=_OTHER_ROPE),
    Fault("router without normalisation", "router: weights", "qwen3_moe", config={"norm_topk_prob": False}),
)
FAULTS = {
    "sglang": (
        *COMMON,
        Fault("sound, OpenAI interface", "", words=("--url-model", "served")),
        Fault("window ignored", "sliding window is ignored", sizes=_WINDOW),
        Fault("raw log-probs", "raw log-probs", variables={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}, words=COLD),
    ),
    "vllm": (  # Gemma 2 and defaults of requests: SGLang 0.5.17 cannot start the one, and ignores the others in completions
        Fault(
            "penalty of the server",
            "a repetition penalty of about 1.50",
            entries=_SAMPLED | {"repetition_penalty": 1.5},
        ),
        Fault("min-p of the server", "a min-p of about 0.2", entries=_SAMPLED | {"min_p": 0.2}),
        Fault(
            "min-p that log-probs do not show",
            "another distribution",
            entries=_SAMPLED | {"min_p": 0.2},
            server=("--logprobs-mode", "raw_logprobs"),
        ),
        Fault(
            "softcap ignored",
            "softcap of the output logits",
            "gemma2",
            _CAPPED,
            config={"final_logit_softcapping": None},
        ),
        Fault("sound gemma2", "", "gemma2", _CAPPED),
        *COMMON,
        Fault("window ignored", "sliding window is ignored", sizes=_WINDOW, config={"use_sliding_window": False}),
        Fault("raw log-probs", "raw log-probs", server=("--logprobs-mode", "raw_logprobs"), words=COLD),
    ),
}


def serve_copy(fault: Fault, checkpoint: Path, directory: Path) -> Path:
    """Make the copy of a checkpoint that is served."""
    shutil.copytree(checkpoint, directory)
    if fault.change is not None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        fault.change(model)
        model.save_pretrained(directory)
    if fault.entries:
        path = directory / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fault.entries))
    return directory


@contextlib.contextmanager
def serve(server: str, python: str, fault: Fault, model: Path) -> Iterator[str]:
    """Start a server in a process of its own; yields its address.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ("--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--served-model-name", "served")
    if server == "sglang":
        command = [python, "-m", "sglang.launch_server", "--model-path", str(model), *common, *_SGLANG]
        overridden = "--json-model-override-args"
    else:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *common, *_VLLM]
        overridden = "--hf-overrides"
    if fault.config:
        command += [overridden, json.dumps(fault.config)]
    path = model.parent / "server.log"
    with path.open("wb") as log:
        variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **fault.variables}
        process = subprocess.Popen(
            [*command, *fault.server], stdout=log, stderr=log, env=variables, cwd=ROOT, start_new_session=True
        )
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + START
    try:
        while not _answers(f"{url}/v1/models"):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"{server}: no answer; its last lines:\n{path.read_text(errors='replace')[-3000:]}")
            time.sleep(1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def verify(server: str, python: str, fault: Fault) -> dict[str, Any]:
    """Run the command on a server; its result.

    Raises:
        RuntimeError: the server did not start, or the command ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", fault.family, fault.sizes)
        with serve(server, python, fault, serve_copy(fault, checkpoint, Path(folder) / "served")) as url:
            return call_verify(url, checkpoint, Path(folder) / "out", fault.words)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--server", choices=FAULTS, required=True)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the server")
    parser.add_argument("--only", default="", help="part of the names of the faults")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    version = [given.python, "-c", f"import {given.server}; print({given.server}.__version__)"]
    served = subprocess.run(version, capture_output=True, text=True, check=False).stdout.split()[-1:]
    faults = [fault for fault in FAULTS[given.server] if given.only in fault.name]
    results: dict[str, dict[str, Any]] = {}
    missed: list[str] = []
    false: list[str] = []
    for fault in faults:
        try:
            result = results[fault.name] = verify(given.server, given.python, fault)
        except RuntimeError as error:
            result = results[fault.name] = {"findings": [], "no result": str(error).strip().splitlines()[-1][:300]}
            print(error, file=sys.stderr)
        first = next(iter(result["findings"]), "")
        if "no result" in result or fault.expected not in first or (first and not fault.expected):
            (missed if fault.expected else false).append(fault.name)
        print(f"{fault.name}: {result}", file=sys.stderr, flush=True)
        planted = sum(1 for each in faults if each.name in results and each.expected)
        summary = {"named": [planted - len(missed), planted], "missed": missed, "false": false}
        sound = {"sound servers": len(results) - planted}
        finish(
            "real_servers",
            {"server": [given.server, *served], **summary, **sound, "results": results},
            given.save,
            lambda: installed("torch", "transformers"),
            given.server,
            quiet=len(results) < len(faults),
        )
    return int(bool(missed or false))


if __name__ == "__main__":
    sys.exit(main())
