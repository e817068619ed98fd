"""The least recompute of a stage by its bytes and the seconds of its link."""

from __future__ import annotations

import pytest
from offloadgraphs import chained

from splitkit.costs.links import HostLink
from splitkit.hardware.link_specs import Link
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.search.recompute.stage_offload import stage_choice
from splitkit.training.choices import savings

LINK = HostLink(Link(1024.0), Link(2048.0))


@pytest.mark.parametrize("seed", range(6))
def test_more_bytes_or_more_time_never_cost_more_than_the_bound_allows(seed):
    hull = Hull.of(savings(*chained(seed)))
    most = hull.choices[-1].nbytes
    for nbytes in range(0, most + 1, 1024):
        alone = hull.within(nbytes)
        for seconds in (0.0, 2.0, 5.0, 100.0):
            found = stage_choice(hull, nbytes, LINK, seconds)
            if found is None:
                assert alone is None or seconds
                continue
            assert found.device_bytes <= nbytes and found.host_bytes <= 1024 * seconds
            assert found.bound <= found.seconds
            assert alone is None or found.seconds <= alone.seconds
            if not seconds:
                assert not found.offloaded and found.seconds == alone.seconds


def test_enough_time_saves_all_recompute():
    hull = Hull.of(savings(*chained(10)))
    least = hull.choices[0].nbytes
    assert hull.within(least).seconds > 0
    found = stage_choice(hull, least, LINK, 100.0)
    assert found.seconds == 0 and found.host_bytes >= hull.choices[-1].nbytes - least
