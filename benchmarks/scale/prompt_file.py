"""How long a run takes to start with a large JSONL file of prompts: the first time, later, and if it checked every row.

Seconds include opening the file and rendering prompts with a tokenizer, as the start of ``miles train`` does. Run it on a quiet machine:
``python benchmarks/scale/prompt_file.py --save`` (two minutes and 2 GB of disk), or with fewer ``--rows``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from miles_core.config.load import load
from miles_core.data import prompt_index, prompts
from miles_core.data.prompts import PromptTemplate
from miles_core.rollout.queue import Limits, examine, open_prompts
from miles_testing import tiny_tokenizer

#: Rows of the file that is checked completely.
COMPLETE = 40_000
WORDS = "how many of the apples that were left in the basket can each of them take home"


def write_rows(file: Path, count: int) -> None:
    """Write rows of about 140 bytes with a prompt, a label and metadata."""
    with file.open("w") as out:
        for first in range(0, count, 10_000):
            rows = range(first, min(first + 10_000, count))
            out.write(
                "".join(
                    json.dumps({"input": f"{n}: {WORDS}", "label": str(n), "metadata": {"n": n}}) + "\n" for n in rows
                )
            )


def start(file: Path) -> dict[str, float]:
    """Open and examine the file; return seconds of the clock and of the processor."""
    config = load(["--label-key", "label"], manifests=[])
    clock, processor = time.perf_counter(), time.process_time()
    found = open_prompts(config, str(file), "--prompt-data")
    examine(found, PromptTemplate(tiny_tokenizer()), config, Limits(), "--prompt-data")
    found.next(512)
    return {"seconds": round(time.perf_counter() - clock, 2), "processor": round(time.process_time() - processor, 2)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where the file is written")
    given = parser.parse_args()
    result: dict[str, Any] = {"rows": given.rows}
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        directory = Path(name)
        os.environ["MILES_CACHE"] = str(directory / "cache")
        write_rows(directory / "part.jsonl", COMPLETE)
        complete = start(directory / "part.jsonl")
        write_rows(directory / "prompts.jsonl", given.rows)
        result["gigabytes"] = round((directory / "prompts.jsonl").stat().st_size / 1e9, 3)
        for which in ("first start", "later start"):
            result[which] = start(directory / "prompts.jsonl")
            print(which, result[which], file=sys.stderr, flush=True)
    result["seconds_if_every_row_were_checked"] = round(complete["seconds"] / COMPLETE * given.rows)
    result["rows_checked"] = min(given.rows, prompt_index.SAMPLE if given.rows >= prompts.ROWS else given.rows)
    result["largest_memory_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    finish("prompt_file", result, given.save, lambda: installed("transformers"))


if __name__ == "__main__":
    main()
