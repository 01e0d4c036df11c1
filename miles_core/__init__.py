"""A plugin-based reinforcement-learning loop for language models.

The public modules are: ``miles_core.plugin`` (manifests, hooks, options, errors), ``miles_core.data``, ``miles_core.engine``,
``miles_core.trainer``, ``miles_formats`` (number formats), and ``miles_core.api``, which programs and notebooks call to train.
In addition, use ``miles_testing`` for tests, ``miles_workers.transport`` for weights between processes and ``miles_workers`` for runtimes.
No other
module is public.
"""

from miles_core.version import __version__

__all__ = ["__version__"]
