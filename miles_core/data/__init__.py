"""What flows: prompts, samples, batches, weight units.

A ``Sample`` is one response and everything recorded about it, a ``Batch`` many of them as flat columns, a ``Field`` a column
that a plugin adds, a ``Unit`` a few tensors of the weight export. Prompt files, chat templates and tokenizers are read here,
and how samples are shared out over ranks (``world``). Knows no run, no option and no plugin.
"""
