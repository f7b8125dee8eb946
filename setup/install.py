#!/usr/bin/env python3
"""Creates the project's virtual environment.

python3 setup/install.py [--runtime auto|cpu|cuda] [--dev] [--venv PATH]
"""

import sys

# First, and in a syntax that every Python 3 can parse.
if sys.version_info < (3, 11):
    sys.stderr.write(
        "error: %s is Python %d.%d; expected 3.11 or newer; try: make PYTHON=/path/to/python3.11"
        " ...\n" % ((sys.executable,) + sys.version_info[:2])
    )
    sys.exit(2)

from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from setup.main import main

if __name__ == "__main__":
    sys.exit(main())
