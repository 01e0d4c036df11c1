"""Converts draft counts to metrics and to the table of ``--profile-speculative``.

The engine reports sums per request, and core averages them over the requests of a step (``engine/NAME``). The ratio of two averages equals
the ratio of the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from miles_speculative.config import MOST


def summarise(metrics: MutableMapping[str, float]) -> None:
    """Add ``speculative/*`` to a step's metrics; with several policies, ``POLICY/speculative/*`` for each policy that has an engine."""
    for prefix, values in _engine_metrics(metrics).items():
        if "decode_steps" in values:
            found = rates(values)
            if "speedup" in found and not prefix and "rollout/tokens_per_second" in metrics:
                found["tokens_per_second_without"] = metrics["rollout/tokens_per_second"] / found["speedup"]
        else:  # an engine that drafts without this plugin reports its own acceptance
            found = {name: value for name, value in values.items() if name.startswith("accept")}
        metrics.update({f"{prefix}speculative/{name}": value for name, value in found.items()})


def _engine_metrics(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Group ``engine/NAME`` and ``POLICY/engine/NAME`` by their prefix: "" or ``POLICY/``."""
    groups: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        prefix, found, short = name.rpartition("engine/")
        if found:
            groups.setdefault(prefix, {})[short] = value
    return groups


def rates(counts: Mapping[str, float]) -> dict[str, float]:
    """Compute rates; a rate whose denominator is zero is left out.

    Args:
        counts: the metrics that ``Ledger`` records, as sums or means.

    Returns:
        ``lookahead``: mean number of drafts; ``accept_rate``: share of drafts kept; ``accept_length``: tokens per step with drafts;
        ``accepted_to_D``: share of drafts kept at depth D; ``speedup``: factor relative to decoding without drafts; ``best_speedup``: the
        factor if every draft had been kept, at the same cost.
    """
    found: dict[str, float] = {}
    if counts["decode_steps"]:
        found["lookahead"] = counts["lookahead"] / counts["decode_steps"]
    if counts["draft_steps"]:
        depths = [d for d in range(1, MOST + 1) if counts.get(f"tried_{d}")]
        kept = sum(counts[f"kept_{d}"] for d in depths)
        found["accept_rate"] = kept / counts["drafted"]
        found["accept_length"] = 1 + kept / counts["draft_steps"]
        found |= {f"accepted_to_{d}": counts[f"kept_{d}"] / counts[f"tried_{d}"] for d in depths}
    # the speed-up is representative only if most of the time can be compared
    if counts["compared_seconds"] > counts["decode_seconds"] / 2:
        found["speedup"] = counts["plain_seconds"] / counts["compared_seconds"]
        rejected = counts["drafted"] * (1 - found.get("accept_rate", 1.0))
        found["best_speedup"] = found["speedup"] * (1 + rejected / _tokens(counts))
    return found


class Profile:
    """Sums of the engine metrics over a run, for the table."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add one step's metrics; call it before ``summarise``."""
        for values in _engine_metrics(metrics).values():
            for name, value in values.items():
                self.sums[name] = self.sums.get(name, 0.0) + value

    def lines(self) -> list[str]:
        """Return the lines of the table; one line if nothing was drafted."""
        counts = self.sums
        if not counts.get("draft_steps"):
            return ["speculative: nothing was drafted, so there is nothing to profile"]
        found, total = rates(counts), counts["decode_seconds"]
        k = counts["drafted"] / counts["draft_steps"]
        kept, length = found["accept_rate"], found["accept_length"]
        lines = [f"speculative: acceptance rate {kept:.2f} of {k:.1f} drafts per step, {length:.2f} tokens per step"]
        shares = {
            name: counts[f"{part}_seconds"] / total for name, part in (("drafting", "draft"), ("verifying", "verify"))
        }
        shares["steps without drafts, bookkeeping"] = 1 - sum(shares.values())
        lines += [f"  {share:6.1%} of the decoding time: {name}" for name, share in shares.items()]
        if "speedup" not in found:
            return [*lines, "  no step without drafts was measured, so there is no speed-up to compare with"]
        # cost of drafting and verifying per step, in units of a step without drafts
        plain = found["speedup"] * total / _tokens(counts)
        draft, check = (counts[f"{name}_seconds"] / counts["draft_steps"] / plain for name in ("draft", "verify"))
        pays = max(length - check, 0) / k
        return [
            *lines,
            f"  speed-up: predicted {length / (draft + check):.2f}, measured {found['speedup']:.2f}",
            f"  drafting a token costs {draft / k:.3f} policy steps; at this acceptance rate the break-even cost is {pays:.3f}",
        ]


def _tokens(counts: Mapping[str, float]) -> float:
    """Return the number of tokens emitted by all steps."""
    return counts["decode_steps"] + sum(counts.get(f"kept_{d}", 0.0) for d in range(1, MOST + 1))
