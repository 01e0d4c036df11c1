"""A decoder with tree drafts: several candidates at each depth, all verified in one forward pass.

The candidates are the draft's most probable continuations and thus deterministic. For a deterministic draft, the rule of ``verify`` becomes
simple: at each node the policy samples its own token, and if a child has this token, its continuation is already computed. The emitted
tokens are exactly those of plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_embedded import Emitted, Row, StepEngine
from miles_speculative.decoder import SpeculativeDecoder, lengths_of, positions_of
from miles_speculative.draft import Draft
from miles_speculative.lookahead import Lookahead


@dataclass(frozen=True)
class Tree:
    """Candidates of every row.

    Attributes:
        tokens: [rows, nodes] token ids, level by level.
        parents: [rows, nodes] index of each node's parent; -1 for the row's last token.
    """

    tokens: Tensor
    parents: Tensor


class TreeDecoder(SpeculativeDecoder):
    """Decoder with tree drafts.

    Args:
        draft, profile: see ``SpeculativeDecoder``.
        lookahead: chooses the number of levels.
        width: number of candidates per level, and maximum number of children of a node.
    """

    def __init__(self, draft: Draft, lookahead: Lookahead, width: int, profile: bool = False) -> None:
        super().__init__(draft, lookahead, profile)
        self.width = width

    def _draft(self, engine: StepEngine, rows: list[Row], k: int) -> Tree:
        """Draft k levels with a beam search over path probabilities (Li et al. 2024, arXiv 2406.16858)."""
        out, lengths, width = self._read(engine, rows).unsqueeze(1), lengths_of(rows), self.width
        count, device = len(rows), out.device
        total = torch.zeros(count, 1, device=device)
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        for level in range(k):
            best, ids = self.draft.logits(out).float().log_softmax(-1).topk(width)  # [rows, nodes, width]
            total, chosen = (total.unsqueeze(-1) + best).flatten(1).topk(width)
            above = chosen // width
            tokens.append(ids.flatten(1).gather(1, chosen))
            parents.append(above + (level - 1) * width if level else torch.full_like(above, -1))
            if level + 1 < k:
                call = engine.call(rows, [width] * count, lengths, torch.cat(parents, 1).cpu().numpy())
                states = out.gather(1, above.unsqueeze(-1).expand(-1, -1, out.shape[-1]))
                fed = self.draft(tokens[-1].flatten(), states.flatten(0, 1), positions_of(call, device), call)
                out = fed.view(count, width, -1)
        return Tree(torch.cat(tokens, 1), torch.cat(parents, 1))

    def _verify(self, engine: StepEngine, rows: list[Row], drafted: Tree) -> Emitted:
        chains = [[row.tokens[-1], *tokens] for row, tokens in zip(rows, drafted.tokens.tolist(), strict=True)]
        # the row's last token is the root
        parents = np.pad(drafted.parents.cpu().numpy() + 1, ((0, 0), (1, 0)), constant_values=-1)
        fed = engine.forward(rows, chains, parents)
        size = len(chains[0])
        depth = np.zeros(parents.shape, np.int64)
        for node in range(1, size):
            depth[:, node] = depth[np.arange(len(rows)), parents[:, node]] + 1
        at = torch.from_numpy((lengths_of(rows)[:, None] + depth).reshape(-1)).to(fed.hidden.device)
        drawn = engine.sample(fed.logits, [row for row in rows for _ in range(size)], at)
        paths = []
        for i, (chain, above) in enumerate(zip(chains, parents.tolist(), strict=True)):
            children = {(a, token): node for node, (a, token) in enumerate(zip(above, chain, strict=True)) if node}
            path, room = [0], min(rows[i].limit - len(rows[i].tokens), size)
            while (
                len(path) < room and (child := children.get((path[-1], drawn.tokens[i * size + path[-1]]))) is not None
            ):
                path.append(child)
            paths.append(path)
        engine.keep(rows, lengths_of(rows) - 1, paths)
        flat = [[i * size + node for node in path] for i, path in enumerate(paths)]
        for row, places in zip(rows, flat, strict=True):
            self._fresh[row] = [fed.hidden[places]]

        def of(values: Any) -> Any:
            return None if values is None else [[values[place] for place in places] for places in flat]

        return Emitted(of(drawn.tokens), of(drawn.log_probs), of(drawn.supports), of(drawn.capped))
