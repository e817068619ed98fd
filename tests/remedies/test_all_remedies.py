"""Every remedy that the source names is carried out by a test of this folder, or listed with a reason."""

from __future__ import annotations

from functools import cache

from carried import carried_out
from listed import LISTED
from sites import sites

every_site = cache(sites)  # when a test runs: each process that collects this file would read the whole source
every_remedy_carried_out = cache(carried_out)


def _open():
    known = every_remedy_carried_out() | set(LISTED)
    return sorted(
        site
        for site in every_site()
        if not any(site.code == code and _begins(site.remedy, told) for code, told in known)
    )


def _begins(remedy, told):
    """Templates are compared as text: both have ``{...}`` in the same places. The empty text is the empty remedy."""
    return remedy.startswith(told) if told else not remedy


def test_each_remedy_is_carried_out_or_listed():
    left = _open()
    assert not left, "no test carries out, and no list has:\n" + "\n".join(map(str, left))


def test_what_is_carried_out_or_listed_still_stands_in_the_source():
    stale = [
        (code, told)
        for code, told in every_remedy_carried_out() | set(LISTED)
        if not any(s.code == code and _begins(s.remedy, told) for s in every_site())
    ]
    assert not stale


def test_nothing_is_both_carried_out_and_listed():
    assert not every_remedy_carried_out() & set(LISTED)


if __name__ == "__main__":
    print(*_open(), sep="\n")
