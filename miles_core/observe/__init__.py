"""What a run tells: metrics, progress, timing, hints, the report."""
