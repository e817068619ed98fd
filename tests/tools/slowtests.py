"""Which tests are slow: ``python tests/tools/slowtests.py TIMES`` makes campaigns of those without an entry.

``pytest -n auto --times=TIMES`` has written the file. A test that is to stay in the default tier gets a group with its
reason in ``tests/slow_tests.toml`` by hand.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE / "helpers"))

from tiers import ENTRIES, MOST, function_of, slow_tests  # noqa: E402

HEAD = ENTRIES.read_text().split("[campaigns]")[0]


def slow(measured: list[tuple[str, bool, float]]) -> set[str]:
    """Tests that take too long; where all cases of one do, its name without their ids."""
    slowest: dict[str, float] = defaultdict(float)
    for test, first, seconds in measured:
        slowest[test] = max(slowest[test], 0.0 if first else seconds)
    cases = defaultdict(set)
    for test in slowest:
        cases[function_of(test)].add(test)
    late = {test for test, seconds in slowest.items() if seconds > MOST}
    return {function_of(test) if cases[function_of(test)] <= late else test for test in late}


def main() -> None:
    measured = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    stay, campaigns = slow_tests()
    known = stay.keys() | campaigns
    new = {test for test in slow(measured) if not {test, function_of(test)} & known}
    every = {test for test in campaigns | new if "[" not in test or function_of(test) not in campaigns | new}
    by_file = defaultdict(list)
    for file, _, test in (name.partition("::") for name in sorted(every)):
        by_file[file].append(f"  {json.dumps(test)},\n")
    lines = "".join(f"{json.dumps(file)} = [\n{''.join(tests)}]\n" for file, tests in by_file.items())
    ENTRIES.write_text(f"{HEAD}[campaigns]\n{lines}")
    print(f"{len(new)} new campaigns, {len(every)} in all, {len(stay)} stay")


if __name__ == "__main__":
    main()
