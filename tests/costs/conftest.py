"""What tests of prices share."""

from __future__ import annotations

import pytest

from splitkit.costs.measuring_run import OwnTime


@pytest.fixture(autouse=True)
def quiet_machine(request, monkeypatch):
    """Tests run several at a time: only those of a busy machine (`test_cpu_time.py`) may find it busy."""
    if request.path.name != "test_cpu_time.py":
        monkeypatch.setattr(OwnTime, "is_busy", lambda self: False)
