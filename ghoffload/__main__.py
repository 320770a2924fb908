"""``python -m ghoffload`` is the ``ghoffload`` command."""

import sys

from ghoffload.cli import main

if __name__ == "__main__":
    sys.exit(main())
