"""``miles verify`` measures the difference between engine and trainer and writes a page about it."""
