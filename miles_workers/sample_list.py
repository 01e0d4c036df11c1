"""Lists of samples for ranks, which receive references to samples of rollout workers instead of the samples.

A message contains, for each group, its reference, and positions and sizes of all groups in packed form. Samples without a reference (the driver has
read them, or set fields) are part of the message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.data.sample import Sample
from miles_core.train.data_shard import DataShard
from miles_workers.packed_column import IndexList, Packed
from miles_workers.remote_sample import Run, StoredGroup, is_complete_reference, pack_run, split_runs, unpack_run


class SampleList(list[Sample]):
    """A list that travels to another process as references and arrives there as a plain list."""

    def __reduce__(self) -> tuple[Any, ...]:
        runs: list[Run | None] = []
        items: list[Any] = []
        for some in split_runs(self, len(self)):
            run = pack_run(some) if is_complete_reference(some[0]) else None
            runs.append(run)
            items.append(some[0] if run is None else run[0])
        firsts, counts = (
            IndexList(run[1] if run else 0 for run in runs),
            IndexList(run[2] if run else 0 for run in runs),
        )
        changed = {number: run[3] for number, run in enumerate(runs) if run and run[3]}
        return _unpack_list, (items, firsts, counts, changed)


def _unpack_list(
    items: Sequence[Any], firsts: Sequence[int], counts: Sequence[int], changed: Mapping[int, Mapping[str, Packed]]
) -> list[Sample]:
    samples: list[Sample] = []
    groups: dict[int, StoredGroup] = {}
    for number, (item, first, count) in enumerate(zip(items, firsts, counts, strict=True)):
        samples += unpack_run((item, first, count, changed.get(number)), groups) if count else [item]
    return samples


def pack_shard(shard: DataShard) -> DataShard:
    """Return a share that is equal and travels to other processes in packed form."""
    return dataclasses.replace(
        shard,
        samples=SampleList(shard.samples),
        step_of=IndexList(shard.step_of),
        positions=IndexList(shard.positions),
    )
