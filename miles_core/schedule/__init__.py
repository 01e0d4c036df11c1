"""Core's schedules: determine when samples are generated relative to training steps."""
