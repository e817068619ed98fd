"""What shows itself hands its options to whatever draws, and writes what that gives."""

from __future__ import annotations

import pytest

from splitkit.display import Shown, ShownOverTime
from splitkit.errors import FileError, ViewError


class Drawer:
    """Notes what it is asked for."""

    def __getattr__(self, what):
        return lambda shown, **options: f"{what} of {type(shown).__name__}: {options}"


@pytest.fixture(autouse=True)
def _drawn(monkeypatch):
    monkeypatch.setattr(Shown, "drawer", staticmethod(Drawer))


def test_options_reach_the_drawer(tmp_path):
    shown, path = ShownOverTime(), tmp_path / "page"
    assert (
        shown.view(height=7, memory="1GiB") == "view of ShownOverTime: {'height': 7, 'live': False, 'memory': '1GiB'}"
    )
    assert shown._framed(3, live=True) == "view of ShownOverTime: {'height': 3, 'live': True}"
    for write in (shown.to_html, shown.to_svg):
        write(path, memory=5)
        assert path.read_text() == f"{write.__name__.removeprefix('to_')} of ShownOverTime: {{'memory': 5}}"
    Shown().to_html(path)
    assert path.read_text() == "html of Shown: {}"
    Shown().to_svg(path)
    assert path.read_text() == "svg of Shown: {}"


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(FileError, match="SK504: cannot write .*: it is a folder"):
        Shown().to_html(tmp_path)


def test_the_name_of_a_file_says_what_is_written_to_it(tmp_path):
    shown, wrong = Shown(), tmp_path / "page.PNG"
    for name, what in (("page.html", "html"), ("page", "html"), ("page.SVG", "svg")):
        shown.to_html(tmp_path / name)
        assert (tmp_path / name).read_text() == f"{what} of Shown: {{}}"
    with pytest.raises(ViewError, match=r"SK901: to_html writes a page, and .*page.PNG is not the name of one"):
        shown.to_html(wrong)
    assert not wrong.exists()
