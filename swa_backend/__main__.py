"""``python -m swa_backend``: the same command line as ``swa-backend``."""

import sys

from swa_backend.cli import main

sys.exit(main())
