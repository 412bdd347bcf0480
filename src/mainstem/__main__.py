"""`python -m mainstem` is the command `mainstem`."""

import sys

from mainstem.cli import main

if __name__ == "__main__":
    sys.exit(main())
