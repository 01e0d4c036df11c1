"""Host memory of images in prompts: 1,000 prompts with 4 images each, 8 samples of each prompt, from reading the files to a checkpoint.

Forms of the images: paths of files, data URIs in JSON lines, and bytes in parquet. Reported are the bytes of all images, the bytes of contents
that the prompts hold and that all samples hold (each object once), growth of the process's memory while the prompts are read and while the
samples are made, and the size of a checkpoint of the samples. A process for each form.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import finish, options
from miles_core.checkpoint.samples import get_samples, put_samples
from miles_core.checkpoint.store import Store
from miles_core.data.parquet import ParquetFile
from miles_core.data.prompts import Prompts
from miles_core.rollout.queue import Prompt
from miles_embedded.testing.images import draw_image

FORMS = ("paths", "data URIs", "parquet")
SAMPLES = 8


def write(form: str, directory: Path, prompts: int, images: int, side: int) -> tuple[Path, int]:
    """Write the prompts; returns the file and the bytes of all images."""
    rows, total = [], 0
    for number in range(prompts):
        contents = [draw_image(number * images + i, side, side) for i in range(images)]
        total += sum(map(len, contents))
        values: list[Any] = contents
        if form == "paths":
            values = [f"{number}-{i}.png" for i in range(images)]
            for name, content in zip(values, contents, strict=True):
                (directory / name).write_bytes(content)
        elif form == "data URIs":
            values = [f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in contents]
        rows.append({"input": [{"role": "user", "content": "<image>" * images + "?"}], "images": values})
    if form == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / "prompts.parquet", row_group_size=100)
        return directory / "prompts.parquet", total
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory / "prompts.jsonl", total


def count_bytes(items: Any) -> int:
    """Bytes of the contents that media hold, each object once."""
    contents = {id(m.source): len(m.source) for item in items for m in item.media if isinstance(m.source, bytes)}
    return sum(contents.values())


def measure(path: Path, count: int, directory: Path) -> dict[str, Any]:
    """Read the prompts, make their samples, save and load them."""
    process = psutil.Process()
    start = process.memory_info().rss
    source = Prompts(str(path), media=True, open_parquet=ParquetFile)
    rows = source.next(count)
    prompts = [Prompt.of(row, [2, 3, 4], number) for number, row in enumerate(rows)]
    read = process.memory_info().rss
    samples = [sample for prompt in prompts for sample in prompt.samples(SAMPLES)]
    made = process.memory_info().rss
    put_samples(Store(directory / "checkpoint"), "samples", samples)
    files = [f for f in (directory / "checkpoint").rglob("*") if f.is_file()]
    loaded = get_samples(Store(directory / "checkpoint"), "samples")
    return {
        "prompts hold": count_bytes(prompts),
        "samples hold": count_bytes(samples),
        "loaded samples hold": count_bytes(loaded),
        "growth, prompts": read - start,
        "growth, samples": made - read,
        "checkpoint": sum(f.stat().st_size for f in files),
    }


def main() -> None:
    parser = options(__doc__)
    for name, default in (("prompts", 1000), ("images", 4), ("side", 224)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one", nargs=2, help="a file of prompts and a directory: measure it in this process")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(Path(given.one[0]), given.prompts, Path(given.one[1]))))
        return
    found: dict[str, Any] = {}
    for form in FORMS:
        with tempfile.TemporaryDirectory() as name:
            path, total = write(form, Path(name), given.prompts, given.images, given.side)
            command = [
                sys.executable,
                "-m",
                "benchmarks.scale.media_memory",
                "--prompts",
                str(given.prompts),
                "--one",
                str(path),
                name,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[form] = {"images": total, **json.loads(done.stdout)}
            print(form, json.dumps(found[form]), file=sys.stderr, flush=True)
    result = {
        "prompts": given.prompts,
        "images of a prompt": given.images,
        "samples of a prompt": SAMPLES,
        "forms": found,
    }
    finish("media_memory", result, given.save, dict)


if __name__ == "__main__":
    main()
