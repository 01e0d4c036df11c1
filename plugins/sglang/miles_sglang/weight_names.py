"""Which tensors make an update of the weights complete.

SGLang loads whatever it is sent and says nothing about what did not come, so an update with a hole would leave the weights of
another version there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from miles_core.data import Encoded
from miles_core.plugin import MilesError

#: A head tied to the embedding is in some checkpoints and not in others.
_TIED = "lm_head.weight"
#: Copies of the embedding and of the head in some checkpoints' MTP layer, for which SGLang takes the policy's own.
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


class WeightNames:
    """Holds every update against the names of the model's weights.

    Args:
        names: the tensors of the checkpoint that SGLang was started for, as they are called before a number format stores
            them; none where they are not known, and then the first complete update says which they are.
        tied: the model's head is its embedding.
        layers: of the model; the checkpoint's weights behind them are those of its MTP layer, which come all or, from a
            trainer that does not hold it, not at all.
    """

    def __init__(self, names: Collection[str] = (), tied: bool = False, layers: int | None = None) -> None:
        self.names, self._optional = set(names), {_TIED} if tied else set()
        self._draft = {name for name in names if _of_mtp(name, layers)}
        self._optional |= {name for name in self._draft if name.endswith(_COPIES)}
        self._settled = bool(names)

    def complete(self, units: Iterable[Encoded]) -> Iterator[Encoded]:
        """``units``, all of an update, held against the names as they pass; errors as of ``Seen``."""
        seen = Seen(self)
        yield from seen.passing(units)
        seen.finish()

    def settle(self, seen: set[str]) -> None:
        """An update of these names is over.

        Raises:
            MilesError: it is incomplete.
        """
        absent = self._draft if not self._draft & seen else set()
        missing = sorted(self.names - seen - self._optional - absent)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise MilesError(
                f"the update of the weights is incomplete: {missing[0]}{more} did not come, and SGLang would keep the old "
                "values without a word; only a complete update makes the engine usable again"
            )
        if not self._settled:
            self.names, self._settled = seen, True

    def foreign(self, name: str) -> bool:
        """Whether the model has no such tensor."""
        return self._settled and name not in self.names and name not in self._optional


class Seen:
    """The names of one update, which comes in one or several pieces."""

    def __init__(self, names: WeightNames) -> None:
        self._names, self._seen = names, set[str]()

    def passing(self, units: Iterable[Encoded]) -> Iterator[Encoded]:
        """Some of its tensors.

        Raises:
            MilesError: one that the model does not have, or one that came twice.
        """
        for unit in units:
            if self._names.foreign(unit.name):
                raise MilesError(
                    f"the update of the weights holds {unit.name}, which the model that SGLang serves does not have; trainer "
                    "and engine must be started with the same --hf-checkpoint"
                )
            if unit.name in self._seen:
                raise MilesError(f"the update of the weights holds {unit.name} twice")
            self._seen.add(unit.name)
            yield unit

    def finish(self) -> None:
        """That was all; MilesError where it is not."""
        self._names.settle(self._seen)


def _of_mtp(name: str, layers: int | None) -> bool:
    """Whether a tensor belongs to an MTP layer, by the two ways in which checkpoints name them."""
    if name.startswith("mtp."):
        return True
    found = re.search(r"\blayers\.(\d+)\.", name)
    return layers is not None and found is not None and int(found.group(1)) >= layers
