"""Run scripts of this directory, each forked from a process that has imported torch and tgen.

Each line on stdin is one JSON object: "name" of the script, and "output", the file for its output.
The answer is its exit status.
"""

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

import command


def main() -> None:
    """Answer requests until stdin is closed."""
    command.import_modules()
    for line in sys.stdin:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            _run(Path(__file__).with_name(f"{request['name']}.py"), request["output"])
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(script: Path, output_path: str) -> None:
    """Run a script as if it had been started with `python`; exit."""
    signal.alarm(1500)  # if it hangs
    status: object = 1
    try:
        output = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(file, number)
        sys.argv = [str(script)]
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    main()
