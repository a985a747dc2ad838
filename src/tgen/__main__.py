"""`tgen`, and `python -m tgen`."""

import gc
import os
import sys

from tgen.cli.phase_times import end_phase


def main() -> None:
    """Run the command line and exit with its status."""
    end_phase("start")
    gc.set_threshold(50_000)  # imports make 60,000 objects, and no garbage
    if sys.platform == "linux" and os.uname().machine == "x86_64":  # torch has MKL there
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # for NumPy, which starts threads
    try:
        import signal  # inside `try`, so that Ctrl-C is quiet during imports too

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a command starts
        from tgen.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.exit(130)


# Python's frames lie in blocks of 16 KB. A call across the end of one maps memory, and its return
# unmaps it: 1,800 times while `tgen generate` imports NumPy. Here, one block holds all frames.
main.__code__ = main.__code__.replace(co_stacksize=32_000)

if __name__ == "__main__":
    main()
