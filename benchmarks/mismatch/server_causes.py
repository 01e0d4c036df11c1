"""Does ``miles verify --budget --url`` name the cause of a gap, and none of a sound server?

A small HTTP server (``server_double``), with SGLang's or OpenAI's interface, serves a tiny random model with
one fault at a time, and ``miles verify`` compares it with the sound checkpoint. Reported is the first cause that it names. Then sound
servers of several families, also some that cannot score given tokens. The exit code is 1 if a cause was not named first, or if a sound
server has one. Takes about five minutes for each server on one core; ``--server`` chooses one, with a result file of its own.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import finish, installed, options
from benchmarks.mismatch.server_double import Faults, serve
from miles_core.cli.main import main as miles
from miles_embedded.model.kv_dtype import round_to_cache
from miles_embedded.testing.families import FAMILIES
from miles_fp8.format import Fp8
from miles_int4.format import Int4
from miles_testing.tiny import random_checkpoint
from miles_tools.demo.model import make_tokenizer

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
#: Interface and dtype of the servers.
SERVERS = (("sglang", "float32"), ("openai", "float32"), ("openai", "bfloat16"))
COLD = ("--rollout-temperature", "0.7")


@dataclass(frozen=True)
class PlantedCause:
    """A fault of a server.

    Attributes:
        name: description. faults: of the double. expected: part of the first cause to be named.
        family, sizes: the model. words: options of the command.
    """

    name: str
    faults: Faults
    expected: str
    family: str = "qwen3"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()


def make_checkpoint(directory: Path, family: str, sizes: Mapping[str, Any]) -> Path:
    """Save a random model with a tokenizer to ``directory``."""
    import transformers

    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**{**values, "max_position_embeddings": 512, **SIZES, **sizes, **ids})
    random_checkpoint(config, directory)
    tokenizer.save_pretrained(directory)
    return directory


def rounded(format: Any) -> Callable[[Any], None]:
    """Round the linear layers of decoder layers to a number format."""

    def plant(model: Any) -> None:
        with torch.no_grad():
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and "lm_head" not in name:
                    module.weight.copy_(format.dequantize(format.quantize(module.weight.bfloat16())))

    return plant


def kv_cache(model: Any) -> None:
    """Round keys and values to FP8."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.qwen3 import modeling_qwen3

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
        key, value = (round_to_cache(x, "float8_e4m3fn") for x in (key, value))
        return modeling_qwen3.eager_attention_forward(module, query, key, value, *args, **named)

    AttentionInterface.register("fp8_cache", attend)
    AttentionMaskInterface.register("fp8_cache", eager_mask)
    model.config._attn_implementation = "fp8_cache"


def other_layer(model: Any) -> None:
    """Change the weights of one layer by 5 %, as an older checkpoint has them."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=draw))


def wrong_position(model: Any, ids: Tensor) -> Tensor:
    """Decode steps at twice the position of their token."""
    positions = torch.arange(ids.shape[1])
    positions[-1] += 3
    found: Tensor = model(ids, position_ids=positions[None]).logits
    return found


def penalty(logits: Tensor, sampling: Mapping[str, Any], tokens: Sequence[int], prompt: int) -> Tensor:
    """Subtract .6 from the logits of tokens that were generated."""
    changed = logits.clone()
    changed[list(set(tokens[prompt:]))] -= 0.6
    return changed / float(sampling["temperature"])


def truncated(logits: Tensor, sampling: Mapping[str, Any], *_: Any) -> Tensor:
    """Report log-probs over the tokens that top-p keeps."""
    ranked, order = (logits / float(sampling["temperature"])).sort(descending=True)
    p = ranked.softmax(-1)
    dropped = torch.zeros_like(p, dtype=torch.bool).scatter(0, order, p.cumsum(-1) - p >= sampling["top_p"])
    return (logits / float(sampling["temperature"])).masked_fill(dropped, -torch.inf)


def mixed(logits: Tensor) -> Tensor:
    """Logits with the errors of another computation."""
    return logits + 0.2 * torch.sin(37 * torch.arange(len(logits)) + 11 * logits)


def minimum(logits: Tensor) -> Tensor:
    """Draw only tokens with a tenth of the largest probability (min-p)."""
    p = logits.softmax(-1)
    return logits.masked_fill(p < 0.1 * p.max(), -torch.inf)


_WINDOW = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
_CAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
CAUSES = (
    PlantedCause("raw log-probs", Faults(reported=lambda x, s, *_: x), "raw log-probs", words=COLD),
    PlantedCause(
        "temperature twice", Faults(reported=lambda x, s, *_: x / s["temperature"] ** 2), "applied twice", words=COLD
    ),
    PlantedCause(
        "top-p normalisation", Faults(reported=truncated), "that top-p 0.7 keep", words=("--rollout-top-p", "0.7")
    ),
    PlantedCause("presence penalty", Faults(reported=penalty), "a penalty of about 0.6"),
    PlantedCause("weights in FP8", Faults(model=rounded(Fp8())), "weights rounded to FP8"),
    PlantedCause("weights in INT4", Faults(model=rounded(Int4())), "weights rounded to INT4"),
    PlantedCause("KV cache in FP8", Faults(model=kv_cache), "KV cache in float8_e4m3fn"),
    PlantedCause("one layer of other weights", Faults(model=other_layer), "other weights"),
    PlantedCause(
        "window ignored",
        Faults(entries={"layer_types": ["full_attention"] * 2}),
        "sliding window is ignored",
        sizes=_WINDOW,
    ),
    PlantedCause(
        "softcap ignored",
        Faults(entries={"final_logit_softcapping": None}),
        "softcap of the output logits",
        "gemma2",
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 1.0, "query_pre_attn_scalar": 32},
    ),
    PlantedCause(
        "rope theta of the default",
        Faults(entries={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        "rope theta 10000",
        sizes={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    PlantedCause(
        "router without normalisation",
        Faults(entries={"norm_topk_prob": False}),
        "router: weights of the chosen experts",
        "qwen3_moe",
    ),
    PlantedCause("decode position", Faults(decoded=wrong_position), "decoding"),
    PlantedCause("cached prefix", Faults(prefix=mixed), "cached prefixes"),
    PlantedCause("batch composition", Faults(batch=mixed), "other rows of the batch"),
    PlantedCause("a token before the prompt", Faults(before=(5,)), "the server adds the token 5"),
    PlantedCause("min-p in draws", Faults(drawn=minimum), "another distribution than the reported one"),
)
SOUND = tuple(
    PlantedCause(f"sound {family}{text}", faults, "", family)
    for family in ("llama", "qwen3", "qwen3_moe", "gemma2")
    for text, faults in (("", Faults()), (" without scores", Faults(scores=False)))
)


def call_verify(url: str, checkpoint: Path, directory: Path, words: Sequence[str]) -> dict[str, Any]:
    """Run ``miles verify --budget`` on a server; return what it found. RuntimeError if the command ended with an error."""
    said = io.StringIO()
    command = [
        "verify",
        "--budget",
        "--url",
        url,
        "--hf-checkpoint",
        str(checkpoint),
        "--save",
        str(directory),
        "--json",
    ]
    with contextlib.redirect_stdout(said):
        code = miles([*command, *words])
    if code not in (0, 1):
        raise RuntimeError(f"miles verify ended with code {code}; its error is above")
    (found,) = json.loads(said.getvalue())["policies"]
    causes = found["budget"]["causes"]
    return {
        "exit code": code,
        "findings": found["findings"],
        "gap": found["gap"]["mean_abs"],
        "causes": {c["name"]: round(c["share"], 4) for c in causes if not c["why"]},
        "not measured": {c["name"]: c["why"] for c in causes if c["why"]},
    }


def verify(cause: PlantedCause, protocol: str, dtype: str = "float32") -> dict[str, Any]:
    """Run the command on a double; its result, with the processor seconds."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", cause.family, cause.sizes)
        with serve(checkpoint, replace(cause.faults, dtype=dtype), protocol) as url:
            found = call_verify(url, checkpoint, Path(folder) / "out", ["--dtype", dtype, *cause.words])
    return found | {"seconds": round(time.process_time() - start, 1)}


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="part of the names of the causes to plant")
    parser.add_argument(
        "--server", default="", choices=["", *map(",".join, SERVERS)], help="one interface and dtype (default: all)"
    )
    parser.add_argument(
        "--serve", type=Path, help="only serve this checkpoint, with the cause --only, until standard input is closed"
    )
    given = parser.parse_args()
    if given.serve:
        faults = next((cause.faults for cause in CAUSES if cause.name == given.only), Faults())
        with serve(given.serve, faults, given.server.partition(",")[0] or "sglang") as url:
            print(url, flush=True)
            sys.stdin.read()
        return 0
    torch.set_num_threads(given.threads)
    results: dict[str, dict[str, Any]] = {}
    missed: list[str] = []
    false: list[str] = []
    causes = [*CAUSES, *SOUND]
    servers = [server for server in SERVERS if not given.server or given.server == ",".join(server)]
    for (protocol, dtype), cause in itertools.product(servers, [c for c in causes if given.only in c.name]):
        label = f"{protocol}, {dtype}: {cause.name}"
        result = results[label] = verify(cause, protocol, dtype)
        first = next(iter(result["findings"]), "")
        if cause.expected not in first or (first and not cause.expected):
            (missed if cause.expected else false).append(label)
        print(f"{label}: {result['findings']} {result['causes']}", file=sys.stderr, flush=True)
    planted = sum(1 for label in results if "sound" not in label)
    finish(
        "server_causes",
        {
            "named": [planted - len(missed), planted],
            "missed": missed,
            "sound servers": len(results) - planted,
            "false": false,
            "results": results,
        },
        given.save,
        lambda: installed("torch", "transformers"),
        given.server.replace(",", "-"),
    )
    return int(bool(missed or false))


if __name__ == "__main__":
    sys.exit(main())
