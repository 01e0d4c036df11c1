"""Trees of tokens behind cached rows: each node sees its path, and a path that is kept is as if it had been fed alone."""

import asyncio

import numpy as np
import pytest
import torch

from miles_core.contracts.engine import Request, Sampling
from miles_embedded.engine.decoder import Decoder
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.engine.step import Emitted
from miles_embedded.model.load import load_model
from miles_testing.tiny import tiny_checkpoint

#: Children of the fed token, and theirs: two paths of which the second is kept.
PARENTS = [-1, 0, 0, 1, 2, 4]
KEPT = [0, 2, 4, 5]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_nodes_see_their_path_and_a_kept_path_stays(tmp_path, family):
    engine = EmbeddedEngine(load_model(tiny_checkpoint(family, tmp_path)), Settings(str, eos=[1]))
    checked = []

    def alone(tokens):
        """Logits behind ``tokens``, computed from nothing."""
        other = EmbeddedEngine(engine.model, Settings(str))
        _, hidden, _ = other.runner.prefixes([tokens], set())
        return other.runner.head(hidden)[0]

    class Branching(Decoder):
        def step(self, engine, rows):
            trees = [[row.tokens[-1], *[(row.tokens[-1] + 3 * n) % 60 + 2 for n in range(1, 6)]] for row in rows]
            fed = engine.forward(rows, trees, np.tile(np.array(PARENTS), (len(rows), 1)))
            logits = fed.logits.view(len(rows), len(PARENTS), -1)
            for row, tree, got in zip(rows, trees, logits, strict=True):
                for node in range(len(PARENTS)):
                    path, at = [], node
                    while at >= 0:
                        path, at = [tree[at], *path], PARENTS[at]
                    torch.testing.assert_close(got[node], alone(row.tokens[:-1] + path), atol=2e-4, rtol=1e-3)
            engine.keep(rows, [len(row.tokens) - 1 for row in rows], [KEPT] * len(rows))
            checked.append(len(rows))
            new = [[tree[n] for n in KEPT[1:]] + [7] for tree in trees]
            return Emitted(new, [[0.0] * len(n) for n in new])

    engine.decoder = Branching()

    async def main():
        requests = [Request([5, 9, 3 + i][: 2 + i], Sampling(9), key=i) for i in range(2)]
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    got = asyncio.run(main())
    assert checked == [2, 2] and all(len(r.tokens) == 9 for r in got)
