"""Finds the most tokens that fit, from few trials."""

from __future__ import annotations

from collections.abc import Callable

from splitkit.errors import CaptureError

MOST_TOKENS = 2**22
"""The most tokens of a sequence that are tried."""
_FIRST, _FACTOR = 2048, 4
_GUESSES = 12
"""Trials of guesses, before halving ends the search."""


def most_fitting(fits: Callable[[int], bool], between: Callable[[int, int], int], context: int | None) -> int:
    """Return the most tokens that fit, 0 if not even one does; the next number does not fit.

    A model that does not run with more tokens than its context has that as its limit; otherwise `MOST_TOKENS` is.

    Args:
        fits: whether so many tokens fit; if they do, so do fewer.
        between: a guess of the most, from tokens that fit and tokens that do not.
        context: the most tokens that the model is made for.
    """
    if not fits(1):
        return 0
    longest = _longest(fits, context)
    low, high = 1, min(_FIRST, longest)
    while fits(high):
        if high == longest:
            return longest
        low, high = high, min(high * _FACTOR, longest)
    for trial in range(64):
        if high - low <= 1:
            break
        guess = between(low, high) if trial < _GUESSES else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
        if low == guess and high - low > 1 and trial < _GUESSES and not fits(low + 1):
            return low
    return low


def _longest(fits: Callable[[int], bool], context: int | None) -> int:
    if context is None:
        return MOST_TOKENS
    try:
        fits(context + 1)
    except CaptureError:
        return context
    return MOST_TOKENS
