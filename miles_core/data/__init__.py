"""Data types of a run: prompts, samples, batches, weight units.

A ``Sample`` is one response with everything recorded about it, a ``Batch`` holds many samples as flat columns, a ``Field`` is a
column that a plugin adds, and a ``Unit`` holds a few tensors of the weight export. This package also reads prompt files, chat
templates and tokenizers, and distributes samples over ranks (``world``). It does not depend on runs, plugins or (except for error
messages) options.
"""
