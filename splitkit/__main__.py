"""``python -m splitkit``."""

import sys

from splitkit.cli import main

sys.exit(main())
