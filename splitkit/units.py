"""Texts of numbers, bytes and times for people, and numbers from such texts."""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from fractions import Fraction

TFLOP = "TFLOP"
"""The unit of prices by FLOPs: 10^12 of them. As numbers they are near those of seconds on a device."""
_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
_BYTES = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", 1):
    _BYTES |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"), (1e-12, "ps"))
_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,20})?)\s*%\s*", re.ASCII)
_SIZE = re.compile(r"\s*(\d{1,2000}(?:\.\d{1,2000})?(?:[eE]\+?\d{1,3})?)\s*([A-Za-z]*)\s*", re.ASCII)


def quantity(value: float) -> str:
    """Return ``1.23 M`` for ``1234567``; small whole numbers stay as they are."""
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T", "P", "E"))


def size(nbytes: float) -> str:
    """Return ``1.50 KiB`` for ``1536``."""
    return _scaled(nbytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def read_size(text: str) -> int | None:
    """Read bytes: 1536 for ``"1.5 KiB"``, 2000 for ``"2kB"``; ``None`` for a text that is not a size."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _BYTES:
        return None
    nbytes = Fraction(match[1]) * _BYTES[match[2].upper()]  # exact, where a float gives 1000 for "1.001 kB"
    if "." in match[1] and _BYTES[match[2].upper()] == 1 and ("e" not in match[1].lower() or nbytes.denominator != 1):
        return None  # a fraction of a byte, so the unit was probably forgotten
    return int(nbytes)


def read_percent(text: str) -> float | None:
    """Read 0.8 from ``"80%"``; ``None`` for anything but a number from 0 to 100 and a percent sign."""
    match = _PERCENT.fullmatch(text)
    share = float(match[1]) / 100 if match else None
    return share if share is not None and share <= 1 else None


def measure(unit: str) -> str:
    """Return what a unit measures, for titles: ``"time"`` for ``"s"``, ``"FLOPs"``, or the unit itself."""
    return {"s": "time", TFLOP: "FLOPs"}.get(unit, unit)


def duration(seconds: float, unit: str = "s") -> str:
    """Return ``12.3 ms`` for ``0.0123``, ``12.30 GFLOP`` for 0.0123 TFLOP, and ``3 nodes`` for a unit of your own."""
    if unit == TFLOP:
        return _scaled(round(seconds * 1e12, 2), 1000.0, _FLOPS)  # digits beyond are rounding errors of sums
    if unit != "s":
        return f"{quantity(seconds)} {unit}"
    for scale, name in _SECONDS:
        if abs(seconds) >= scale * 0.9995:
            number = seconds / scale
            return f"{number:.0f} {name}" if abs(number) >= 999.5 else f"{number:.3g} {name}"
    return f"{seconds / 1e-12:.2g} ps" if seconds else "0 us"


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base * 0.9995 and power < len(units) - 1:
        value /= base
        power += 1
    whole = power == 0 and value == int(value)
    number = f"{value:.0f}" if whole or abs(value) >= 100 else f"{value:.2f}"
    return f"{number} {units[power]}".rstrip()


def in_words(said: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(said[:-1]), *said[-1:]]))


def bounded(nbytes: int, above: Sized, below: Sized = ()) -> str:
    """Return ``13.45 GiB``, and say on which side it errs: ``at most``, ``at least`` or ``about``.

    Args:
        nbytes: the bytes.
        above: what was counted by an upper bound; if anything was, the text begins with ``at most``.
        below: what was counted by a lower bound; then the text begins with ``at least``, with both ``about``.
    """
    words = {(True, False): "at most ", (False, True): "at least ", (True, True): "about "}
    return words.get((bool(len(above)), bool(len(below))), "") + size(nbytes)
