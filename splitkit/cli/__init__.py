"""The command line: parses the arguments, runs one command and prints its outcome.

Errors become messages and exit codes: 0 success, 1 error, 2 wrong usage, 3 no plan fits, 4 the split differs from the
unsplit model, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from importlib import import_module

from splitkit.cli import distribution
from splitkit.cli.launcher import end_with_launcher, raise_interrupt, remembered_interrupts
from splitkit.cli.outcome import Outcome, check_outputs, jsonable, write_outputs
from splitkit.cli.parser import make_parser
from splitkit.errors import CheckError, NoPlanError, PlanWarning, SplitError, UsageError, nearest

__all__ = ["main"]

ERROR, USAGE, NO_PLAN, DIFFERENT = 1, 2, 3, 4  # exit codes
BAD_PARAMETERS = ("SK301", "SK302", "SK330")  # errors in the parameters of a policy or schedule: wrong usage
INTERRUPTED, PIPE_CLOSED = 128 + 2, 128 + 13  # as a shell reports SIGINT and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, by default that of the process, and return its exit code."""
    end_with_launcher()
    words = list(sys.argv[1:] if argv is None else argv)
    with remembered_interrupts() as interrupt:
        try:
            return _run(words)
        except BrokenPipeError:
            return _reader_has_gone()
        except KeyboardInterrupt:
            return _fail("interrupted", INTERRUPTED, "--json" in words)
        except Exception as error:
            if interrupt.came:
                return _fail("interrupted", INTERRUPTED, "--json" in words)
            if "--debug" in words:
                raise
            return _fail(error, exit_code(error), "--json" in words)


def exit_code(error: Exception) -> int:
    """Return the exit code for an error."""
    if isinstance(error, NoPlanError):
        return NO_PLAN
    if isinstance(error, CheckError):
        return DIFFERENT
    if isinstance(error, SplitError) and error.code in BAD_PARAMETERS:
        return USAGE
    return USAGE if isinstance(error, UsageError) else ERROR


def _run(words: list[str]) -> int:
    try:
        args = make_parser().parse_args(words)
    except SystemExit as done:  # --help and --version
        sys.stdout.flush()
        return int(done.code or 0)
    check_outputs(args)
    quiet = nullcontext() if args.debug else _silence()
    with quiet, redirect_stdout(sys.stderr) if args.json else nullcontext(), _own_output():
        load_own_schedules(args)
        command = import_module(f"splitkit.cli.commands.{args.command}")
        raise_interrupt()
        outcome: Outcome = command.run(args)
    aside = write_outputs(outcome.files)
    if outcome.quiet:
        return outcome.code
    if args.json:
        print(json.dumps(jsonable({"command": args.command, **outcome.data}), indent=1, allow_nan=False))
    else:
        from splitkit.view.console import show

        with (
            redirect_stdout(sys.stderr) if aside else nullcontext()
        ):  # whoever reads the file from standard output must get nothing else
            show(*outcome.text)
    sys.stdout.flush()
    return outcome.code


@contextmanager
def _own_output() -> Iterator[None]:
    """Send what native libraries print (HiGHS does) to standard error, so that standard output stays parseable."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # standard output or standard error is closed
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _warn(message: Warning | str, *where: object, **others: object) -> None:
    """Print a warning without the line of Python code that raised it, which means nothing to a user."""
    print(f"warning: {message}", file=sys.stderr)


@contextmanager
def _silence() -> Iterator[None]:
    """Silence warnings and logs of torch and transformers, which concern the model's author; keep plan warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", PlanWarning)
            warnings.showwarning = _warn
            yield
    finally:
        logging.disable(before)


def _fail(error: Exception | str, code: int, as_json: bool) -> int:
    facts = _facts(error)
    try:
        if as_json:
            print(json.dumps({"error": facts}, indent=1))
            sys.stdout.flush()
        else:
            title = f"{facts['code']}: " if facts["code"] else ""
            print(f"error: {title}{facts['reason']}" if isinstance(error, Exception) else error, file=sys.stderr)
            if facts["remedy"]:
                print(f"  {facts['remedy']}", file=sys.stderr)
    except BrokenPipeError:
        _reader_has_gone()
    return code


def _facts(error: Exception | str) -> dict[str, str | list[str] | None]:
    """Return an error as JSON data; ``code`` is ``None`` for an error that is not splitkit's."""
    if isinstance(error, SplitError):
        return {"code": error.code, "reason": error.reason, "remedy": error.remedy, "nodes": list(error.nodes)}
    if isinstance(error, str):
        return {"code": None, "reason": error, "remedy": "", "nodes": []}
    remedy = "Run the command again with --debug to see the traceback."
    if notes := getattr(error, "__notes__", ()):
        remedy = f"{notes[-1]}. Fix it there; --debug shows the traceback."
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"Install {error.name}; `splitkit doctor` shows what else is missing."
    if isinstance(error, ImportError | AttributeError) and (clash := distribution.other()):
        remedy = f"Another package may have overwritten files of splitkit ({clash}): {distribution.REMEDY}."
    return {"code": None, "reason": f"{type(error).__name__}: {error}", "remedy": remedy, "nodes": []}


def _reader_has_gone() -> int:
    """Redirect standard output to nowhere, so that Python's flush at exit does not fail on the closed pipe."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


# Loads the user's own schedules: ``--schedule my_schedules.py:half_eager``.


def load_own_schedules(args: Namespace) -> None:
    """Register the schedules that ``--schedule`` and ``--schedules`` name in files, and replace them by their names.

    Keeps ``--schedule`` as it was written in ``args.schedule_text``.

    Raises:
        UsageError: SK601 if the file has no such schedule.
        CaptureError: SK402, SK403 if the file or package does not exist.
        ScheduleError: SK333 if the schedule's name is taken.
    """
    if hasattr(args, "schedule"):
        args.schedule_text = args.schedule
        if args.schedule is not None:
            args.schedule = _named(args.schedule)
    if getattr(args, "schedules", None):
        args.schedules = tuple(map(_named, args.schedules))


def _named(text: str) -> str:
    place, colon, name = text.rpartition(":")
    if not colon:
        return text
    from splitkit.pipeline.schedule import Schedule
    from splitkit.pipeline.schedules import register_schedule
    from splitkit.testing.factory import module_at

    module = module_at(place)
    found = getattr(module, name, None)
    if not isinstance(found, Schedule):
        known = [key for key, value in vars(module).items() if isinstance(value, Schedule)]
        then = f"It has {', '.join(known)}." if known else "Define one in it: splitkit.extend.Schedule(...)."
        raise UsageError("SK601", f"{place} has no schedule called {name}", nearest(name, known, then))
    register_schedule(found)
    return found.word
