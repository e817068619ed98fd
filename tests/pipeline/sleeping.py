"""One rank of ``benchmarks/schedules.py``: ``CASES REPEAT FOLDER``, the cases as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def main() -> None:
    from schedules import Case, run_rank

    cases, repeat, folder = sys.argv[1:]
    run_rank(int(os.environ["RANK"]), [Case(**case) for case in json.loads(cases)], int(repeat), folder)
