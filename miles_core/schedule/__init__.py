"""Core's schedules: when samples are generated, seen from the training of the steps before them."""
