"""Loads the user's own schedules: ``--schedule my_schedules.py:half_eager``."""

from __future__ import annotations

from argparse import Namespace

from splitkit.errors import UsageError, nearest


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
