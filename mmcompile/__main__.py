"""``python -m mmcompile``: the command line."""

import sys

from mmcompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
