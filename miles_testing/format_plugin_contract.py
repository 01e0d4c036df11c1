"""Contract tests for a plugin with one number format: its manifest, and toy runs with it.

    class TestMyPlugin(FormatPluginContract):
        plugin = miles_mine.plugin

The plugin must be installed, or be on the path of the tests with its entry point. Test specific properties of the format (a recipe, further
restrictions, weights that it does not quantise) next to this suite.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest

from miles_core.errors import PlanError
from miles_core.plugin.load import import_target
from miles_core.plugin.manifest import Pair, Plugin
from miles_core.precision.format import Format
from miles_core.precision.schedule import PLAIN


class FormatPluginContract:
    """Subclass it and set ``plugin``.

    Attributes:
        plugin: the manifest.
        options: flags that make the format fit the toy model, as for ``toy_run``.
        sizes: sizes of the toy model; the format must be able to store every matrix.
        gap: smallest mean |difference of log-probs| when only the engine uses the format, in nats per token.
        agreement: largest mean |difference of log-probs| when engine and trainer use the format, in nats per token.
    """

    plugin: Plugin
    options: Mapping[str, Any] = {}
    sizes: Mapping[str, Any] = {}
    gap = 1e-3
    agreement = 1e-5

    # -- the manifest -----------------------------------------------------------------------------------------------

    def test_importing_the_manifest_imports_no_torch(self) -> None:
        program = f"import sys, {self._package()}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

    def test_the_format_is_where_the_manifest_says(self) -> None:
        plugin = self.plugin
        assert list(plugin.formats) == [plugin.name]
        found = import_target(plugin.name, plugin.formats[plugin.name])
        assert issubclass(found, Format) and found.name == plugin.name
        assert plugin.version == import_module(self._package()).__version__

    def test_hardware_is_checked_and_emulation_waives_it(self, plan: Callable[..., Any]) -> None:
        for pair in self.plugin.pairs:
            needs = [rule.needs for rule in pair.rules if rule.hardware]
            known = [int(found[1]) for text in needs if (found := re.fullmatch(r"gpu\.sm >= (\d+)", text))]
            if not needs:
                accepted = plan(facts=["gpu.sm=70"], **self._flags(pair))
                assert self.plugin.name in accepted.order and not accepted.waived
            if not known:
                continue
            below, enough = [f"gpu.sm={max(known) - 10}"], [f"gpu.sm={max(known)}"]
            with pytest.raises(PlanError, match=rf"gpu\.sm >= {max(known)}") as refusal:
                plan(facts=below, **self._flags(pair))
            assert "--emulate-precision" in str(refusal.value)
            assert self.plugin.name in plan(facts=enough, **self._flags(pair)).order
            assert plan(facts=below, emulate_precision=True, **self._flags(pair)).waived

    def test_one_side_alone_is_refused_unless_the_manifest_pairs_it(self, plan: Callable[..., Any]) -> None:
        name, declared = self.plugin.name, {(pair.rollout, pair.train) for pair in self.plugin.pairs}
        for pair in (Pair(name, PLAIN), Pair(PLAIN, name)):
            if (pair.rollout, pair.train) not in declared:
                with pytest.raises(PlanError, match=name):
                    plan(emulate_precision=True, **self._flags(pair))

    def test_recommendations_are_those_of_the_pair(self, plan: Callable[..., Any]) -> None:
        said = {}
        for pair in self.plugin.pairs:
            accepted = plan(emulate_precision=True, **self._flags(pair))
            said[pair] = "\n".join(accepted.advice)
            assert all(rule.because in said[pair] for rule in pair.recommends)
            assert pair.experimental == ("is experimental" in said[pair])
        for pair, advice in said.items():
            others = {rule.because for other in said for rule in other.recommends} - {
                r.because for r in pair.recommends
            }
            assert not any(because in advice for because in others)

    # -- a run --------------------------------------------------------------------------------------------------------

    def test_engine_and_trainer_agree_when_both_use_it(self, toy_run: Callable[..., Any]) -> None:
        for pair in self.plugin.pairs:
            if pair.rollout == pair.train:
                assert self._gap(toy_run, pair) < self.agreement

    def test_the_engine_alone_is_another_model(self, toy_run: Callable[..., Any]) -> None:
        for pair in self.plugin.pairs:
            if pair.train == PLAIN:
                assert self._gap(toy_run, pair) > self.gap

    def _package(self) -> str:
        return self.plugin.formats[self.plugin.name].split(":")[0].split(".")[0]

    def _flags(self, pair: Pair) -> dict[str, Any]:
        """Return the flags of a pair, and the options that make the format fit."""
        flags = {"rollout": pair.rollout, "train": pair.train}
        return {
            **self.options,
            **{f"{side}_{precision}": True for side, precision in flags.items() if precision != PLAIN},
            **({"sizes": dict(self.sizes)} if self.sizes else {}),
        }

    def _gap(self, toy_run: Callable[..., Any], pair: Pair) -> float:
        steps = toy_run(emulate_precision=True, **self._flags(pair)).metrics
        return float(sum(step["mismatch/abs_log_prob"] for step in steps) / len(steps))
