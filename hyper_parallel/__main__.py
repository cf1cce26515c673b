"""``python -m hyper_parallel`` is the ``hyper-parallel`` command."""

import sys

from hyper_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
