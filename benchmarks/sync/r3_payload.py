"""What a routing record weighs: bytes a token in each code, and the codec's speed, for the shapes of published models.

Records are random (each row k distinct experts, uniformly), which is the worst case for any code. ``list`` keeps the order of
experts, ``set`` is for ascending rows; ``bound`` is log2 C(E, k) bits a layer; ``zlib`` is int32 deflated at level 6. Speeds are
in bytes of the int32 record a second, one thread, the best of several repetitions. The last line is one JSON object.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measure import finish, installed, options

#: model -> (layers with experts, experts, experts a token).
SHAPES = {
    "qwen3-30b-a3b": (48, 128, 8),
    "deepseek-v3": (58, 256, 8),
    "glm-4.5": (89, 160, 8),
    "minimax-m2": (62, 256, 8),
    "gpt-oss-120b": (36, 128, 4),
    "mixtral-8x7b": (32, 8, 2),
}


def best(work: Callable[[], Any], repetitions: int) -> float:
    """Seconds of the fastest of ``repetitions``."""
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure(layers: int, experts: int, k: int, tokens: int, repetitions: int) -> dict[str, float]:
    """Bytes a token and MB/s of one shape."""
    from miles_r3.codec import bound_bits, decode, encode

    generator = np.random.default_rng(0)
    chosen = generator.random((tokens, layers, experts), dtype=np.float32).argpartition(k, -1)[..., :k]
    generator.shuffle(chosen.reshape(-1, k).T)
    as_chosen = np.ascontiguousarray(chosen, dtype=np.int32)
    row = {"int32": 4.0 * layers * k, "zlib": round(len(zlib.compress(as_chosen.tobytes())) / tokens, 1)}
    for name, routes in (("list", as_chosen), ("set", np.sort(as_chosen, -1))):
        payload = encode(routes, experts)
        if not np.array_equal(decode(payload), routes):
            raise SystemExit(f"the {name} code of {layers} x {k} of {experts} did not come back as it was")
        row[name] = round(len(payload) / tokens, 2)
        megabytes = routes.nbytes / 1e6
        row[f"{name}_encode_mb_s"] = round(megabytes / best(lambda r=routes: encode(r, experts), repetitions))
        row[f"{name}_decode_mb_s"] = round(megabytes / best(lambda p=payload: decode(p), repetitions))
    row["bound"] = round(layers * bound_bits(experts, k) / 8, 2)
    return row


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a record")
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    table = {}
    for name, shape in SHAPES.items():
        table[name] = measure(*shape, given.tokens, given.repetitions)
        print(f"{name:15} " + "  ".join(f"{k} {v:g}" for k, v in table[name].items()), file=sys.stderr, flush=True)
    result = {"tokens": given.tokens, "bytes_a_token_and_speed": table}
    finish("r3_payload", result, given.save, lambda: installed("miles-core", "miles-plugin-r3", "numpy"))


if __name__ == "__main__":
    main()
