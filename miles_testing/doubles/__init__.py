"""Stand-ins for production parts: the same contracts across a process boundary, without their software."""
