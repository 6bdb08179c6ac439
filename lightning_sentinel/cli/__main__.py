"""``python -m lightning_sentinel.cli``."""

import sys

from . import main

sys.exit(main())
