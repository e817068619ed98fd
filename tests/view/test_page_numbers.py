"""Numbers that the page writes are rounded as Python rounds them."""

from __future__ import annotations

import pytest
from browser import NEEDS_CHROMIUM
from steeredpages import GPT2, planned, shown

from splitkit.units import duration, size
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def ladder():
    return LadderView(*planned("gpt2", 4, **GPT2))


@pytest.fixture(scope="module")
def opened(browser, ladder, tmp_path_factory):
    return shown(browser, tmp_path_factory.mktemp("page"), ladder)


def test_numbers_are_rounded_as_in_python(opened):
    sizes = [0, 7, 1000, 1023, 1024, 5760, 5888, 102500, 2**20 - 1, 3 * 2**29, 7 * 2**40 + 2**33]
    times = [0, 1e-13, 4e-10, 0.9996e-6, 4.021e-6, 0.0123, 0.01225, 0.5, 99.96, 1234, 12345.6]
    assert opened.value(f"{sizes}.map(size)") == [size(nbytes) for nbytes in sizes]
    assert opened.value(f'{times}.map(s => duration(s, "s"))') == [duration(seconds) for seconds in times]
    assert opened.value(f'{sizes}.map(s => duration(s, "FLOPs"))') == [duration(n, "FLOPs") for n in sizes]
