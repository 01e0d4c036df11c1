"""Weight sync: units, encoding, transports."""
