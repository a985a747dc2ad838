"""`tgen`, and `python -m tgen`."""

import sys


def main() -> None:
    """Runs the command line and leaves the process with its exit status."""
    try:
        import signal  # here, so that a Ctrl-C meanwhile is as quiet as one later

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a command begins
        from tgen.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
