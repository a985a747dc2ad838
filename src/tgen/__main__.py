"""`tgen`, and `python -m tgen`."""

import sys


def main() -> None:
    """Runs the command line and leaves the process with its exit status."""
    try:
        import signal  # here, so that a Ctrl-C meanwhile is as quiet as one later

        at_once = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if at_once:  # as long as there is nothing to save or to say
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from tgen.cli import app

        if at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
