"""Bugs that a campaign plants: small, in bodies of functions, and swapped into functions that are there already."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mutants import changes, planted
from mutation import CAUGHT, SURVIVED, Campaign, Verdict, _swap, table

SOURCE = '''"""A file."""
LIMIT = 3


class Shop:
    @property
    def prices(self) -> list[int]:
        """What things cost; no bug goes in here: not 1 < 2."""
        return [price for price in (3, 1, 2) if price >= 2]

    def pay(self, what, *, strict: int = 2 + 1):
        if what < LIMIT and not what == 0:
            raise ValueError(f"{what + 1} is too little")
        return min(what, LIMIT)


def visits(shop, count=1 + 1):
    seen = {*shop.prices, count}
    seen.add(7)
    return [(lambda price: price + 1)(price) for price in sorted(seen)]
'''


@pytest.mark.parametrize(
    ("function", "kind", "line"),
    [
        ("Shop.prices", "filter", "        return ([price for price in (3, 1, 2)])"),
        ("Shop.prices", "value", "        return []"),
        ("Shop.prices", "comparison", "        return [price for price in (3, 1, 2) if (price > 2)]"),
        ("Shop.pay", "comparison", "        if (what <= LIMIT) and not what == 0:"),
        ("Shop.pay", "condition", "        if (not (what < LIMIT and (not what == 0))):"),
        ("Shop.pay", "operator", "        if (what < LIMIT or not what == 0):"),
        ("Shop.pay", "operand", "        if (what < LIMIT):"),
        ("Shop.pay", "not", "        if what < LIMIT and (what == 0):"),
        ("Shop.pay", "statement", "            pass"),
        ("Shop.pay", "function", "        return (max(what, LIMIT))"),
        ("visits", "union", "    seen = ({count})"),
        ("visits", "statement", "    pass"),
        ("visits", "operator", "    return [(lambda price: (price - 1))(price) for price in sorted(seen)]"),
        ("visits", "constant", "    seen.add((8))"),
    ],
)
def test_a_bug_is_one_small_change(function, kind, line):
    made = [planted(SOURCE, change) for change in changes(SOURCE)[function] if change.kind == kind]
    (mutant,) = [mutant for mutant in made if mutant and line in mutant.source.splitlines()]
    removed, added = Counter(SOURCE.splitlines()), Counter(mutant.source.splitlines())
    assert added - removed == Counter([line]) and mutant.line == SOURCE.splitlines().index(*(removed - added)) + 1


def test_no_bug_is_planted_where_it_changes_no_result():
    lines = [planted(SOURCE, change).line for found in changes(SOURCE).values() for change in found]
    text = SOURCE.splitlines()
    untouched = [number for number, line in enumerate(text, 1) if number not in lines and line.strip()]
    assert {"LIMIT = 3", "    def pay(self, what, *, strict: int = 2 + 1):"} < {text[n - 1] for n in untouched}
    kept = [planted(SOURCE, change).source for found in changes(SOURCE).values() for change in found]
    assert all(source.count('{what + 1} is too little") ') == 0 and "1 < 2" in source for source in kept)


def test_a_bug_reaches_functions_that_are_there(tmp_path):
    file = tmp_path / "shop.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("shop", file)
    shop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shop)
    visits, goods = shop.visits, shop.Shop()  # held by whoever imported them
    assert visits(goods) == [3, 4, 8] and goods.prices == [3, 2]
    for old, new, prices, found in (
        (">= 2", "> 2", [3], [3, 4, 8]), ("price + 1", "price - 1", [3, 2], [1, 2, 6])
    ):  # fmt: skip
        _swap(file, SOURCE, SOURCE.replace(old, new))
        assert goods.prices == prices and visits(goods) == found
        _swap(file, SOURCE, SOURCE)


def test_the_same_seed_draws_the_same_bugs(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "shop.py").write_text(SOURCE)

    def drawn(seed):
        campaign = Campaign(["package"], 12, seed, 1.0, {})
        campaign.root = tmp_path
        return [mutant.change for _, mutant in campaign.drawn("package")]

    first, again, other = ([(c.function, c.kind, c.node.lineno, c.new) for c in drawn(seed)] for seed in (0, 0, 1))
    assert first == again != other and len(first) == len(set(first)) == 12
    assert {function for function, *_ in first[:3]} == {"Shop.prices", "Shop.pay", "visits"}  # each before any again


@pytest.mark.campaign  # only people run such campaigns
def test_a_campaign_plants_bugs_in_a_copy_and_says_which_the_tests_catch(tmp_path):
    here = Path(__file__).parents[2]
    words = ["tests/tools/mutation.py", "--package", "solvers", "--count", "2", "--only", "balanced_blocks"]
    words += ["--called", str(tmp_path / "called.json"), "--tests"]
    kept = (here / "splitkit/solvers/line/balanced_blocks.py").read_text()
    done = subprocess.run(
        [sys.executable, *words, "tests/solvers/test_balanced_blocks.py"],
        cwd=here, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "solvers: 2 planted, " in done.stdout and "caught   solvers/line/balanced_blocks.py:" in done.stdout
    assert (here / "splitkit/solvers/line/balanced_blocks.py").read_text() == kept


def test_the_table_counts():
    verdicts = [Verdict("a.py", 1, "f", "not", "", outcome, 1, 0.0) for outcome in (CAUGHT, CAUGHT, SURVIVED)]
    assert table(verdicts) == "3 planted, 2 caught (0 by time), 0 more by campaigns, 1 survived"
