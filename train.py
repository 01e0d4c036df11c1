"""``python train.py ARGS`` from a checkout is ``miles train ARGS``."""

import sys

from miles_core.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
