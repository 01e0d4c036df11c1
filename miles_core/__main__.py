"""Run the ``miles`` command with ``python -m miles_core``."""

import sys

from miles_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
