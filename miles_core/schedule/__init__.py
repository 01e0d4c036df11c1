"""The synchronous schedule, and what every schedule is made of: when samples are generated, seen from the training steps."""
