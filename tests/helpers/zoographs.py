"""The zoo, made once for all tests of a process that leave its graphs as they are."""

from __future__ import annotations

from functools import cache

from splitkit.testing import Specimen, zoo


@cache
def specimens() -> dict[str, Specimen]:
    """Name -> specimen."""
    return {specimen.name: specimen for specimen in zoo()}
