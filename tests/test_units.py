"""Numbers as people write and read them."""

from __future__ import annotations

import pytest

from splitkit.units import read_size, size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("512", 512),
        (" 7 b ", 7),
        ("1.5 KiB", 1536),
        ("2kB", 2000),
        ("1.001 kB", 1001),  # as a float it is a little less
        ("3GiB", 3 * 2**30),
        ("1pib", 2**50),
        ("9" * 400, int("9" * 400)),
    ],
)
def test_sizes_are_read_exactly(text, nbytes):
    assert read_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "much", "2 XiB", "-1", "1.5.2", "nan", "1e9", "GiB", ".5", "\u0663"])
def test_what_is_no_size(text):
    assert read_size(text) is None


@pytest.mark.parametrize("nbytes", [1, 1536, 5 * 2**20, 7 * 2**40, 3 * 2**50])
def test_what_is_printed_is_read_again(nbytes):
    assert read_size(size(nbytes)) == nbytes
