"""``python -m miles_core`` is ``miles``."""

import sys

from miles_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
