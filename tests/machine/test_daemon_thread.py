"""Calls in threads that the end of the process does not wait for."""

import subprocess
import sys
import threading

import pytest

from support.command import PythonFork, clean_environment
from tgen.machine.daemon_thread import in_daemon_thread


def test_result_and_error_are_those_of_the_function():
    assert in_daemon_thread(lambda: threading.current_thread().name, name="own").result() == "own"
    with pytest.raises(ZeroDivisionError):
        in_daemon_thread(lambda: 1 // 0, name="own").result()


def test_process_ends_while_a_call_waits():
    code = """
import threading
from tgen.machine.daemon_thread import in_daemon_thread
in_daemon_thread(threading.Event().wait, name="waits")
print("ends")
"""
    command = [sys.executable, "-c", code]
    with PythonFork(command, stdout=subprocess.PIPE, env=clean_environment()) as process:
        printed, _ = process.communicate(timeout=300)
    assert (printed, process.returncode) == (b"ends\n", 0)
