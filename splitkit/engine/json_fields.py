"""Values of a JSON file that know their place in it, so that errors can name the file and the field."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from splitkit.checks import is_whole
from splitkit.errors import FileError


@dataclass(frozen=True)
class JsonField:
    """A value of a file.

    Attributes:
        file: the name of the file.
        place: the path of the value in it, such as ``nodes[3].args``.
        value: the value that JSON gave.
    """

    file: str
    place: str
    value: Any

    def __getitem__(self, name: str) -> JsonField:
        """Return a field of an object."""
        if not isinstance(self.value, dict):
            raise self.damaged("an object")
        if name not in self.value:
            raise FileError(
                "SK505",
                f"{self.file} is damaged: it has no field {self._below(name)!r}",
                WRITE_AGAIN,
                [self._below(name)],
            )
        return JsonField(self.file, self._below(name), self.value[name])

    def items(self) -> Iterator[JsonField]:
        """Yield the items of a list."""
        if not isinstance(self.value, list):
            raise self.damaged("a list")
        for i, value in enumerate(self.value):
            yield JsonField(self.file, f"{self.place}[{i}]", value)

    def fields(self) -> Iterator[tuple[str, JsonField]]:
        """Yield the fields of an object with their names."""
        if not isinstance(self.value, dict):
            raise self.damaged("an object")
        for name, value in self.value.items():
            yield name, JsonField(self.file, self._below(name), value)

    def text(self) -> str:
        """Return a string that can be printed."""
        if not isinstance(self.value, str) or not self.value.isprintable():
            raise self.damaged("a string")
        return self.value

    def whole(self, below: int = 2**63) -> int:
        """Return a whole number from 0 to ``below - 1``."""
        if not is_whole(self.value) or not 0 <= self.value < below:
            raise self.damaged(f"a whole number below {below}")
        return int(self.value)

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.damaged("true or false")
        return self.value

    def sizes(self) -> list[int]:
        """Return a list of whole numbers."""
        return [item.whole() for item in self.items()]

    def damaged(self, wanted: str) -> FileError:
        """Return the error for a value that is not what was wanted."""
        what = f"{self.place} is {reprlib.repr(self.value)}, not {wanted}" if self.place else f"it is not {wanted}"
        return FileError("SK505", f"{self.file} is damaged: {what}", WRITE_AGAIN, [self.place] if self.place else [])

    def _below(self, name: str) -> str:
        return f"{self.place}.{name}".lstrip(".")


WRITE_AGAIN = "Write the folder again: splitkit split PLAN -o FOLDER, or splitkit.runtime.save_stages."
