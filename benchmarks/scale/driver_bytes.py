"""How many bytes per sample the driver sends and receives with ``--rollout-workers``: a count, not a time.

The real loop with an engine and a trainer that cost nothing (``driver_double.py``), two rollout workers, two ranks and the process that saves
samples, as in ``rollout_workers.py``. Messages count in full, arrays and shared memory that the driver writes included. ``routes`` is the
number of layers with a routing record. Run: ``python benchmarks/scale/driver_bytes.py --save`` (one minute).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.scale.rollout_workers import measure

#: groups of a step, samples of a group, tokens of a response, tokens of a prompt, layers with a routing record
SIZES = (
    (32, 8, 256, 10, 0),
    (32, 8, 256, 100, 0),
    (32, 8, 2048, 100, 48),
    (128, 8, 256, 100, 0),
    (32, 16, 256, 100, 0),
    (128, 2, 256, 100, 0),
)


def main() -> None:
    parser = options(__doc__)
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    for groups, size, length, prompt, routes in SIZES:
        found = measure(2, groups, length, routes, 0.0, size, prompt)["driver_bytes_per_sample"]
        case = {"groups": groups, "samples": size, "response_tokens": length, "prompt_tokens": prompt, "routes": routes}
        rows.append({**case, **found, "total": round(sum(found.values()), 1)})
        print(rows[-1], file=sys.stderr, flush=True)
    finish(Path(__file__).stem, {"rows": rows}, chosen.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
