"""The command `moebius`, and `python -m moebius`."""

import signal
import sys

from . import _native


def main() -> int:
    """Runs the command line of this process; the exit status."""
    # Python would keep Ctrl-C for code that never runs.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.main(["moebius", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
