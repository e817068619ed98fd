"""The small nets of the tests, for benchmarks: they lie in ``tests/helpers``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from smallnets import NETS, ResNet, UNet, loss_or_sum

__all__ = ["NETS", "ResNet", "UNet", "loss_or_sum"]
