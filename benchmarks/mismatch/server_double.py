"""A small HTTP server with SGLang's and OpenAI's interface over a Transformers model, with faults, for ``server_causes`` and tests.

Every forward pass computes the
whole sequence, so only tiny models are fast enough.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass
class Faults:
    """What is wrong with the double. The defaults are a sound server.

    Attributes:
        model: changes the loaded model. entries: overridden entries of config.json.
        reported: (logits [vocabulary], sampling parameters, token ids before) -> logits of reported log-probs; default: divided by the
            temperature. drawn: the same for draws.
        decoded: changes the logits of decode steps; receives the model and token ids.
        prefix: changes the logits after a prompt that was seen before. batch: those of requests with several rows.
        before: token ids added to every prompt. scores: whether given tokens are scored. dtype: of the model.
    """

    model: Callable[[Any], None] | None = None
    entries: Mapping[str, Any] = field(default_factory=dict)
    reported: Callable[[Tensor, Mapping[str, Any], Sequence[int], int], Tensor] | None = None
    drawn: Callable[[Tensor], Tensor] | None = None
    decoded: Callable[[Any, Tensor], Tensor] | None = None
    prefix: Callable[[Tensor], Tensor] | None = None
    batch: Callable[[Tensor], Tensor] | None = None
    before: tuple[int, ...] = ()
    scores: bool = True
    dtype: str = "float32"


def _tempered(logits: Tensor, sampling: Mapping[str, Any], *_: Any) -> Tensor:
    return logits / float(sampling["temperature"])


class Double:
    """The model behind the double."""

    def __init__(self, checkpoint: Path, faults: Faults) -> None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(checkpoint)
        for name, value in faults.entries.items():
            setattr(config, name, value)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, config=config, attn_implementation="eager", dtype=getattr(torch, faults.dtype)
        )
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        if faults.model is not None:
            faults.model(self.model)
        self.faults, self.seen = faults, set[tuple[int, ...]]()
        self.draw = torch.Generator().manual_seed(0)
        self.lock = threading.Lock()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        found: Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return found

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens after the first."""
        lp = self.logits(tokens)[:-1].log_softmax(-1)
        return [float(row[token]) for row, token in zip(lp, tokens[1:], strict=True)]

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], sampling: Mapping[str, Any], rows: int) -> tuple[list[int], list[float]]:
        faults, tokens, found = self.faults, list(prompt), []
        cached = tuple(prompt) in self.seen
        self.seen.add(tuple(prompt))
        for _ in range(int(sampling["max_new_tokens"])):
            ids = torch.tensor([tokens])
            if faults.decoded is not None and len(tokens) > len(prompt):
                logits = faults.decoded(self.model, ids)[0, -1].float()
            else:
                logits = self.model(ids).logits[0, -1].float()
            logits = faults.prefix(logits) if faults.prefix and cached else logits
            logits = faults.batch(logits) if faults.batch and rows > 1 else logits
            reported = (faults.reported or _tempered)(logits, sampling, tokens, len(prompt))
            drawn = reported if faults.drawn is None else faults.drawn(reported)
            token = int(torch.multinomial(drawn.softmax(-1), 1, generator=self.draw))
            found.append(float(reported.log_softmax(-1)[token]))
            tokens.append(token)
        return tokens[len(prompt) :], found


class Handler(BaseHTTPRequestHandler):
    """Both interfaces; ``protocol`` chooses the one that exists."""

    double: Double
    protocol = "sglang"
    status = 0

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def send(self, content: Any, status: int = 200) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/get_model_info" and self.protocol == "sglang":
            return self.send({"model_path": "double"})
        if self.path == "/v1/models" and self.protocol != "sglang":
            return self.send({"data": [{"id": "double"}]})
        return self.send({"error": "not found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.double.lock:
            if self.path == "/generate" and self.protocol == "sglang":
                return self.send(self._sglang(body))
            if self.path == "/v1/completions" and self.protocol != "sglang":
                return self.send(self._openai(body))
        return self.send({"error": "not found"}, 404)

    def _sglang(self, body: Any) -> Any:
        double, found = self.double, []
        rows = body["input_ids"] if "input_ids" in body else [double.tokenizer(t)["input_ids"] for t in body["text"]]
        for row in rows:
            prompt = [*double.faults.before, *row]
            sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, **body["sampling_params"]}
            tokens, lps = double.generate(prompt, sampling, len(rows))
            meta: dict[str, Any] = {"output_token_logprobs": [[p, t, None] for p, t in zip(lps, tokens, strict=True)]}
            if body.get("logprob_start_len") == 0 and double.faults.scores:
                last = double.model.config.vocab_size - 1  # which SGLang lists as 0
                meta["input_token_logprobs"] = [
                    [p, t if t < last else 0, None] for p, t in zip([None, *double.score(prompt)], prompt, strict=True)
                ]
            found.append({"text": "", "output_ids": tokens, "meta_info": meta})
        return found

    def _openai(self, body: Any) -> Any:
        double, choices = self.double, []
        given = body["prompt"]
        rows = [double.tokenizer(given)["input_ids"]] if isinstance(given, str) else given
        rows = rows if isinstance(rows[0], list) else [rows]
        for index, row in enumerate(rows):
            prompt = [*double.faults.before, *row]
            sampling = {"top_p": 1.0, "top_k": -1, **body, "max_new_tokens": body["max_tokens"]}
            tokens, lps = double.generate(prompt, sampling, len(rows))
            choice: dict[str, Any] = {"index": index, "text": "", "token_ids": tokens, "prompt_token_ids": prompt}
            choice["logprobs"] = {"tokens": [f"token_id:{t}" for t in tokens], "token_logprobs": lps}
            if "prompt_logprobs" in body and double.faults.scores:
                scored = [{str(t): {"logprob": p}} for t, p in zip(prompt[1:], double.score(prompt), strict=True)]
                choice["prompt_logprobs"] = [None, *scored]
            choices.append(choice)
        return {"choices": choices}


@contextmanager
def serve(
    checkpoint: Path, faults: Faults | None = None, protocol: str = "sglang", handler: type[Handler] = Handler
) -> Iterator[str]:
    """Serve a checkpoint in a thread; yields the address."""
    double = Double(checkpoint, faults or Faults())
    made = type("Bound", (handler,), {"double": double, "protocol": protocol})
    server = ThreadingHTTPServer(("127.0.0.1", 0), made)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
