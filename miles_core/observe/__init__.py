"""What a run tells: metrics, progress, time, hints, the report.

Numbers go to ``metrics.jsonl`` and to sinks, a person sees progress and hints, and ``report`` draws one page from a run's
directory. Reads what a run wrote and never asks the run itself.
"""
