"""Checks that a weight update contains exactly the model's tensors.

An engine may load the tensors it receives and not report missing ones, so an incomplete update would mix two versions of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from miles_core.data.weight_unit import Encoded
from miles_core.errors import MilesError

#: Prefix of the weights of a draft that is a model or a head of its own.
DRAFT = "draft."
#: Checkpoints with tied embeddings may contain the output layer or omit it.
_TIED = "lm_head.weight"
#: Suffixes of copies of the embedding and the output layer in some checkpoints' MTP layer; engines use the policy's tensors instead.
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


class WeightNames:
    """Checks every update against the names of the model's weights.

    Args:
        engine: the engine's name in error messages.
        names: tensor names of the checkpoint before quantisation; empty if unknown, and then the first complete update defines them.
        tied: the output layer is tied to the embedding.
        layers: number of decoder layers; layers with a higher index are MTP layers. An update contains all MTP tensors or, if the
            trainer does not hold the MTP layer, none.
        draft: updates also contain the weights of a separate draft model; the first complete update defines their names.
    """

    def __init__(
        self,
        engine: str,
        names: Collection[str] = (),
        tied: bool = False,
        layers: int | None = None,
        draft: bool = False,
    ) -> None:
        self.engine, self._drafts = engine, draft
        self.names, self._optional = set(names), {_TIED} if tied else set()
        self._draft = {name for name in names if _of_mtp(name, layers)}
        self._optional |= {name for name in self._draft if name.endswith(_COPIES)}
        self._complete = bool(names)

    def check_all(self, units: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield ``units``, a whole update, while checking the names. Raises the errors of ``NameCheck``."""
        seen = NameCheck(self)
        yield from seen.check(units)
        seen.finish()

    def finish_update(self, seen: set[str]) -> None:
        """Finish an update that contained the names ``seen``.

        Raises:
            MilesError: the update is incomplete.
        """
        absent = self._draft if not self._draft & seen else set()
        missing = sorted(self.names - seen - self._optional - absent)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise MilesError(
                f"the weight update is incomplete: {missing[0]}{more} did not arrive, and {self.engine} would silently keep the old values; "
                "only a complete update makes the engine usable again"
            )
        if not self._complete:
            self.names, self._complete = seen, True
        if self._drafts:
            self.names |= {name for name in seen if name.startswith(DRAFT)}

    def is_unknown(self, name: str) -> bool:
        """Whether the model has no such tensor."""
        if self._drafts and name.startswith(DRAFT) and not any(known.startswith(DRAFT) for known in self.names):
            return False
        return self._complete and name not in self.names and name not in self._optional


class NameCheck:
    """The names of one update, which comes in one or several pieces."""

    def __init__(self, names: WeightNames) -> None:
        self._names, self._seen = names, set[str]()

    def check(self, units: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield ``units`` while checking the names.

        Raises:
            MilesError: the model has no such tensor, or the tensor arrived twice.
        """
        for unit in units:
            if self._names.is_unknown(unit.name):
                raise MilesError(
                    f"the weight update contains {unit.name}, which {self._names.engine}'s model does not have; start trainer and engine with the "
                    "same --hf-checkpoint"
                )
            if unit.name in self._seen:
                raise MilesError(f"the weight update contains {unit.name} twice")
            self._seen.add(unit.name)
            yield unit

    def finish(self) -> None:
        """Finish the update. Raises MilesError if tensors are missing."""
        self._names.finish_update(self._seen)


def _of_mtp(name: str, layers: int | None) -> bool:
    """Whether a tensor belongs to an MTP layer, under either of the two naming schemes of checkpoints."""
    if name.startswith("mtp."):
        return True
    found = re.search(r"\blayers\.(\d+)\.", name)
    return layers is not None and found is not None and int(found.group(1)) >= layers
