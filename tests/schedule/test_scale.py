"""The work of ``async`` grows with the groups, not with their square."""

from __future__ import annotations

from types import SimpleNamespace

from miles_core.data.sample import Sample
from miles_core.schedule.continuous import AsyncSchedule


class Counted(list):
    """A list that counts the items that slices of it hold."""

    looked = 0

    def __getitem__(self, where):
        found = super().__getitem__(where)
        Counted.looked += len(found) if isinstance(where, slice) else 1
        return found


def group(number, version):
    sample = Sample(tokens=[1, 2], response_length=1, weight_versions=[(1, version)], group_index=number)
    return SimpleNamespace(group_index=number), [sample]


def test_a_group_is_checked_once_per_step():
    rollout = SimpleNamespace(max_weight_staleness=1, stale_samples="drop", batch_size=1000)
    policy = SimpleNamespace(name="policy", version=5)
    hooks = SimpleNamespace(chain=lambda *_, **__: [])
    run = SimpleNamespace(
        config=SimpleNamespace(rollout=rollout), hooks=hooks, step=0, policies=[policy], policy=policy
    )
    back = []
    prompts = SimpleNamespace(put_back=back.extend)
    collector = SimpleNamespace(ready=Counted(), prompts=prompts, rollout=None)
    schedule, fresh = AsyncSchedule(run, collector), 0
    for number in range(2000):  # one group after the other finishes, every tenth too late
        collector.ready.append(group(number, 3 if number % 10 == 0 else 4))
        fresh = schedule._drop_stale(fresh)
    assert fresh == len(collector.ready) == 1800 and schedule._dropped == len(back) == 200
    assert all(prompt.group_index % 10 for prompt, _ in collector.ready)
    assert Counted.looked <= 3 * 2000  # checking all ready groups each time looks at 3.6 million
