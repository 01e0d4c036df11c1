"""``miles watch`` serves the page of runs on this machine while they work."""
