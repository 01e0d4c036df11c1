"""Observability of a run: metrics, progress, timing, hints.

Metrics are written to ``metrics.jsonl`` and to sinks; progress and hints are shown to the user. Reports use only the files in the run
directory, never a running process.
"""
