"""Finds the most tokens that fit, from few trials."""

from __future__ import annotations

from collections.abc import Callable

MOST_TOKENS = 2**22
"""The most tokens of a sequence that are tried."""
_FIRST, _FACTOR = 2048, 4


def most_fitting(fits: Callable[[int], bool], between: Callable[[int, int], int], longest: int | None) -> int:
    """Return the most tokens that fit, 0 if not even one does; the next number does not fit.

    Args:
        fits: whether so many tokens fit; if they do, so do fewer.
        between: a guess of the most, from tokens that fit and tokens that do not.
        longest: the most that the model runs with, ``None`` for no limit but `MOST_TOKENS`.
    """
    longest = longest or MOST_TOKENS
    if not fits(1):
        return 0
    if fits(longest):
        return longest
    low, high = 1, min(_FIRST, longest)
    while fits(high):
        low, high = high, min(high * _FACTOR, longest)
    guessing = True
    while high - low > 1:
        width = high - low
        guess = min(max(between(low, high), low + 1), high - 1) if guessing else (low + high) // 2
        low, high = (guess, high) if fits(guess) else (low, guess)
        if guessing and low == guess and high - low > 1 and not fits(low + 1):
            return low
        # Where bytes are curved, guesses close in from one side only: halve the interval in between.
        guessing = not guessing or high - low < width // 2
    return low
