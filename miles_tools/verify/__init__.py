"""``miles verify``: how far engine and trainer differ, and its page."""
