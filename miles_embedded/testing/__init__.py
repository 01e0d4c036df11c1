"""Test kit of the embedded backend: number formats inside models, and test doubles based on this backend.

``FormatInModelContract`` extends ``FormatContract`` with tests in engine and trainer. ``ProcessEngine`` is the engine in another
process. ``lacking`` returns why the installed Transformers cannot run a
family. Importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_embedded.testing.families import lacking
    from miles_embedded.testing.format_in_model import FormatInModelContract
    from miles_embedded.testing.process_engine import ProcessEngine

__all__ = ["FormatInModelContract", "ProcessEngine", "lacking"]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_embedded.testing.families": "lacking",
        "miles_embedded.testing.format_in_model": "FormatInModelContract",
        "miles_embedded.testing.process_engine": "ProcessEngine",
    },
)
