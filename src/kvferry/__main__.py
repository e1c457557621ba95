"""``python -m kvferry`` is the ``kvferry`` command."""

from __future__ import annotations

import sys

from kvferry.cli import main

if __name__ == "__main__":
    sys.exit(main())
