"""From the counts that requests come back with to rates, and to the table of ``--profile-speculative``.

The engine reports sums a request; core averages them over the requests of a step (``engine/NAME``), so a ratio of two is that of the sums.
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


def rates(said: Mapping[str, float]) -> dict[str, float]:
    """What is known of: mean lookahead, share of drafted tokens kept, tokens a step with drafts, share of drafts kept up to each depth,
    and how much faster decoding was than without drafts.

    Args:
        said: what the ledger counted, sums or means.
    """
    found: dict[str, float] = {}
    if said["decode_steps"]:
        found["lookahead"] = said["lookahead"] / said["decode_steps"]
    if said["draft_steps"]:
        depths = [d for d in range(1, MOST + 1) if said.get(f"tried_{d}")]
        kept = sum(said[f"kept_{d}"] for d in depths)
        found["accept_rate"] = kept / said["drafted"]
        found["accept_length"] = 1 + kept / said["draft_steps"]
        found |= {f"accepted_to_{d}": said[f"kept_{d}"] / said[f"tried_{d}"] for d in depths}
    # where few steps can be compared, as those without drafts at the end of responses, they say nothing about the others
    if said["compared_seconds"] > said["decode_seconds"] / 2:
        found["speedup"] = said["plain_seconds"] / said["compared_seconds"]
    return found


class Profile:
    """Sums of a run's steps, for the table."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """One step's metrics, before they are summarised."""
        for values in _engine_metrics(metrics).values():
            for name, value in values.items():
                self.sums[name] = self.sums.get(name, 0.0) + value

    def lines(self) -> list[str]:
        """The table; one line where nothing was drafted."""
        said = self.sums
        if not said.get("draft_steps"):
            return ["speculative: nothing was drafted, so there is nothing to profile"]
        found, total = rates(said), said["decode_seconds"]
        k = said["drafted"] / said["draft_steps"]
        kept, length = found["accept_rate"], found["accept_length"]
        lines = [f"speculative: {kept:.2f} of {k:.1f} drafts a step kept, {length:.2f} tokens a step"]
        shares = {
            name: said[f"{part}_seconds"] / total for name, part in (("drafting", "draft"), ("verifying", "verify"))
        }
        shares["steps without drafts, counting"] = 1 - sum(shares.values())
        lines += [f"  {share:6.1%} of the time of decoding: {name}" for name, share in shares.items()]
        if "speedup" not in found:
            return [*lines, "  no step without drafts was measured, so there is no speed-up to compare with"]
        # what drafting and verifying take a step, in steps without drafts
        plain = found["speedup"] * total / _tokens(said)
        draft, check = (said[f"{name}_seconds"] / said["draft_steps"] / plain for name in ("draft", "verify"))
        pays = max(length - check, 0) / k
        return [
            *lines,
            f"  speed-up: predicted {length / (draft + check):.2f}, measured {found['speedup']:.2f}",
            f"  drafting a token costs {draft / k:.3f} of a step of the policy; at this acceptance it pays below {pays:.3f}",
        ]


def _tokens(said: Mapping[str, float]) -> float:
    """Tokens emitted by steps, those with drafts and those without."""
    return said["decode_steps"] + sum(said.get(f"kept_{d}", 0.0) for d in range(1, MOST + 1))
