"""Numbers for people."""

from __future__ import annotations

import re
from collections.abc import Sized
from fractions import Fraction

_BYTES = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", 1):
    _BYTES |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"), (1e-12, "ps"))
_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,20})?)\s*%\s*", re.ASCII)
_SIZE = re.compile(r"\s*(\d{1,2000}(?:\.\d{1,2000})?(?:[eE]\+?\d{1,3})?)\s*([A-Za-z]*)\s*", re.ASCII)


def quantity(value: float) -> str:
    """``1234567`` -> ``1.23 M``; small whole numbers stay as they are."""
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T", "P", "E"))


def size(nbytes: float) -> str:
    """``1536`` -> ``1.50 KiB``."""
    return _scaled(nbytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def read_size(text: str) -> int | None:
    """``"1.5 KiB"`` -> 1536, ``"2kB"`` -> 2000, ``"512"`` -> 512, ``"1e3"`` -> 1000; ``None`` for what is no size."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _BYTES:
        return None
    nbytes = Fraction(match[1]) * _BYTES[match[2].upper()]  # exact, where a float gives 1000 for "1.001 kB"
    if "." in match[1] and _BYTES[match[2].upper()] == 1 and ("e" not in match[1].lower() or nbytes.denominator != 1):
        return None  # half a byte: the unit was forgotten
    return int(nbytes)


def read_percent(text: str) -> float | None:
    """``"80%"`` -> 0.8; ``None`` for anything but a number from 0 to 100 and a percent sign."""
    match = _PERCENT.fullmatch(text)
    share = float(match[1]) / 100 if match else None
    return share if share is not None and share <= 1 else None


def duration(seconds: float, unit: str = "s") -> str:
    """``0.0123`` -> ``12.3 ms``, ``4e-10`` -> ``400 ps``; ``3 nodes`` for prices in another unit than ``"s"``."""
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


def at_most(nbytes: int, bounds: Sized) -> str:
    """``13.45 GiB``, or ``at most 13.45 GiB`` if upper ``bounds`` stand for some sizes."""
    return f"at most {size(nbytes)}" if bounds else size(nbytes)
