"""`Remat`: refusals. Its plans are tested in ``tests/frontends/test_joint.py``."""

from __future__ import annotations

import pytest
from jointgraphs import Hand

from splitkit.costs import unit
from splitkit.errors import PolicyError
from splitkit.policies import Remat


@pytest.mark.parametrize("modules", [5, [5], [], (), None, b"h.*", ["h.*", None]])
def test_what_is_no_pattern_of_modules(modules):
    with pytest.raises(PolicyError, match=r"SK302: Remat has modules=.*\n  Give 'transformer\.h\.\*'"):
        Remat(modules=modules)


def test_a_name_that_is_no_op_kept_nothing_in_silence():
    h = Hand().inputs(w=1).op("a", 4, "w").op("loss", 1, "a").gradients(t=1).back("g", 1, "t", "a")
    flow = h.flow("loss", "g")
    with pytest.raises(PolicyError, match=r"SK304: Remat was given 'aten\.mmm'.*\n  Did you mean aten\.mm, ") as caught:
        Remat(keep=["aten.mm", "aten.mmm"]).assign(flow, unit(flow.root))
    assert caught.value.nodes == ("aten.mmm",)
    Remat(keep=["aten.mm"]).assign(flow, unit(flow.root))  # the graph has none of it, which is fine
