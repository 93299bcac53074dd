"""`python -m shmserve`, and the installed program `shmserve`."""

import signal
import sys


def main() -> int:
    """Run the command line. An interrupt, even during the imports, exits with status 130."""
    # The CLI unblocks SIGINT after its imports: numpy would convert a KeyboardInterrupt during the
    # imports to an ImportError.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        from shmserve.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
