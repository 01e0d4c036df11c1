"""The synchronous schedule and the base of all schedules, which determine when samples are generated relative to training steps."""
