"""The test kit for plugin authors.

``toy_run`` and ``plan`` are pytest fixtures once miles-core is installed, and functions here. ``EngineContract``,
``TrainerContract`` and ``FormatContract`` are suites an implementation is run through. Importing this imports no torch.
"""

from miles_core.testing.toy import ToyRun, plan, toy_files, toy_run

__all__ = ["ToyRun", "plan", "toy_files", "toy_run"]
