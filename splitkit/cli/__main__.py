"""Runs the command line as ``python -m splitkit.cli``."""

import sys

from splitkit.cli import main

sys.exit(main())
