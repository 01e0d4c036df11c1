"""The HTML report of a run, its plots and its sample browser."""
