"""``python -m splitkit``, and the command ``splitkit``."""

import sys


def main() -> int:
    """Run the command line of the process; interrupted while it is loaded, it ends as it does later."""
    try:
        from splitkit.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
