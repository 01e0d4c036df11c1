"""``train.py`` at the root of a checkout."""

import subprocess
import sys
from pathlib import Path


def test_the_script_is_the_command_train():
    script = Path(__file__).parents[1] / "train.py"
    done = subprocess.run([sys.executable, script, "--lr", "fast"], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "--lr fast" in done.stderr and "Traceback" not in done.stderr
