"""Reads defaults of options from ``splitkit.toml`` and the environment; what is written on the command line wins.

``splitkit.toml`` lies in the working directory or in the nearest directory above it that has one::

    links = "nvlink4"          # every command that has --links

    [plan]
    costs = "roofline:h100"    # splitkit plan only

``SPLITKIT_LINKS=pcie4`` overrides the file, and an empty value removes what the file says.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitkit.cli.syntax.arguments import INSTEAD, Parser
from splitkit.errors import UsageError, nearest

FILE = "splitkit.toml"
PREFIX = "SPLITKIT_"
_NEVER = ("help", "version", "debug", "json")
"""Options that have no default: whoever reads the output must be able to rely on its form."""


@dataclass(frozen=True)
class OptionDefault:
    """The default of an option.

    Attributes:
        option: its name, such as ``on-cycle``.
        value: the value as on the command line; ``""`` for none.
        origin: where it comes from, for messages.
        command: the only command that it is for; ``None`` for all that have the option.
    """

    option: str
    value: str | bool
    origin: str
    command: str | None = None


def apply_settings(parser: Parser, words: Sequence[str]) -> list[str]:
    """Make settings the defaults of the options of the command in ``words``; return a text for each that was used.

    A setting is left out if ``words`` has an option that excludes it (``--policy`` where the setting is ``stages``).

    Raises:
        UsageError: SK604 if the file is not TOML, or a setting names no option or has a value that it does not take.
    """
    commands = parser.commands()
    found = list(_from_file(commands))
    for setting in found:
        _require_known(setting, commands)
    found += [setting for setting in _from_environment(commands) if setting.option in _known(setting, commands)]
    name = next((word for word in words if word in commands), None)
    if name is None:
        return []
    own = {setting.option: setting for setting in found if setting.command in (None, name)}  # the last one counts
    return list(_set_defaults(commands[name], own, words))


def _set_defaults(command: Parser, own: Mapping[str, OptionDefault], words: Sequence[str]) -> Iterator[str]:
    given = {word.partition("=")[0] for word in words}
    for option, setting in own.items():
        action = command.long_options().get(option)
        if action is None or setting.value == "" or given & command.excluding(action):
            continue
        action.default = _converted(command, action, setting)
        command.set_defaults(**{action.dest: action.default})
        action.required = False
        if not given & {*action.option_strings}:
            yield f"{option} = {setting.value} ({setting.origin})"


def _converted(command: Parser, action: argparse.Action, setting: OptionDefault) -> Any:
    """Return the value that the option would have if the setting were written on the command line."""
    if action.nargs == 0:
        if isinstance(setting.value, bool):
            return action.const if setting.value else action.default
        if setting.value in ("1", "true", "0", "false"):
            return action.const if setting.value in ("1", "true") else action.default
        raise _wrong(setting, "Write true or false.")
    try:
        return command.value_of(action, str(setting.value))
    except argparse.ArgumentError as error:
        reason, _, instead = error.message.partition(INSTEAD)
        raise _wrong(setting, f"Write {instead or reason}.") from error


def _wrong(setting: OptionDefault, remedy: str) -> UsageError:
    return UsageError("SK604", f"{setting.origin}: {setting.option} = {setting.value!r}", remedy)


def _known(setting: OptionDefault, commands: Mapping[str, Parser]) -> set[str]:
    """Return the options of the command that a setting is for, or of all commands."""
    of = [commands[setting.command]] if setting.command else list(commands.values())
    return {name for command in of for name in command.long_options()} - {*_NEVER}


def _require_known(setting: OptionDefault, commands: Mapping[str, Parser]) -> None:
    known = _known(setting, commands)
    if setting.option in known:
        return
    where = f"splitkit {setting.command}" if setting.command else "any command"
    remedy = nearest(setting.option, sorted(known), "`splitkit COMMAND --help` lists the options.")
    raise UsageError("SK604", f"{setting.origin}: {setting.option} is not an option of {where}", remedy)


def _from_file(commands: Mapping[str, Parser]) -> Iterator[OptionDefault]:
    path = settings_file()
    if path is None:
        return
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("SK604", f"{path} cannot be read: {error}", "Correct it, or remove the file.") from error
    for name, value in data.items():
        if not isinstance(value, dict):
            yield OptionDefault(name, _text(path, name, value), str(path))
        elif name not in commands:
            remedy = nearest(name, sorted(commands), "Name a command.")
            raise UsageError("SK604", f"{path}: [{name}] is not a command of splitkit", remedy)
        else:
            for option, own in value.items():
                yield OptionDefault(option, _text(path, option, own), f"{path} [{name}]", name)


def _text(path: Path, name: str, value: object) -> str | bool:
    """Return a TOML value as on the command line; a list is joined by commas."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(type(item) in (str, int, float) for item in value):
        return ",".join(map(str, value))
    raise UsageError("SK604", f"{path}: {name} = {value!r}", "Write a text, a number, true, false, or a list of texts.")


def _from_environment(commands: Mapping[str, Parser]) -> Iterator[OptionDefault]:
    """Yield ``SPLITKIT_LINKS``, and ``SPLITKIT_PLAN_COSTS`` for one command; other programs may use the prefix too."""
    found = []
    for name, value in os.environ.items():
        if name.startswith(PREFIX):
            option = name.removeprefix(PREFIX).lower().replace("_", "-")
            command, _, rest = option.partition("-")
            own = bool(rest) and command in commands
            found.append(OptionDefault(rest, value, name, command) if own else OptionDefault(option, value, name))
    yield from sorted(found, key=lambda setting: setting.command is not None)


def settings_file() -> Path | None:
    """Return the ``splitkit.toml`` of the working directory, or of the nearest directory above it."""
    try:
        here = Path.cwd()
    except OSError:  # the directory is gone
        return None
    return next((path for folder in (here, *here.parents) if (path := folder / FILE).is_file()), None)
