"""What torch's split_module gets wrong, each with torch's outcome beside ours; the tests stand in the files beside.

wrong: wrong results in silence; raises: errors on valid input; loses: lost information; lacks: what torch has no notion
of. That splitkit's is a drop-in for all that torch's does rightly is shown by the tests that stay in that folder.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("torch_wrong", "torch_raises", "torch_loses", "torch_lacks")

from torch_lacks import *  # noqa: E402, F403
from torch_loses import *  # noqa: E402, F403
from torch_raises import *  # noqa: E402, F403
from torch_wrong import *  # noqa: E402, F403
