"""Finds the most tokens that fit, from few trials."""

from __future__ import annotations

from collections.abc import Callable

MOST_TOKENS = 2**22
"""The most tokens of a sequence that are tried."""
_FIRST = 512
"""The tokens that are tried first: fewer make a smaller step, from which no larger one can be guessed."""
_SLOW = 3
"""Guesses that may leave most of the interval before it is halved: where bytes are curved, they come from one side."""


def most_fitting(fits: Callable[[int], bool], between: Callable[[int, int], int], longest: int | None) -> int:
    """Return the most tokens that fit, 0 if not even one does; the next number does not fit.

    Args:
        fits: whether so many tokens fit; if they do, so do fewer.
        between: a guess of the most, from tokens that fit and tokens that do not.
        longest: the most that the model runs with, ``None`` for no limit but `MOST_TOKENS`.
    """
    longest = longest or MOST_TOKENS
    low, high = min(_FIRST, longest), longest
    if not fits(low):
        low, high = 1, low
        if not fits(low):
            return 0
    elif fits(high):
        return high
    slow = 0
    while high - low > 1:
        width = high - low
        guess = min(max(between(low, high), low + 1), high - 1) if slow < _SLOW else (low + high) // 2
        low, high = (guess, high) if fits(guess) else (low, guess)
        slow = 0 if high - low <= (width + 1) // 2 else slow + 1
    return low
