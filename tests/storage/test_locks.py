"""Lock files: one process owns a folder, even while others remove or lock it."""

import errno
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from support.runs import contents, request, resume
from tgen import runs
from tgen.errors import LockedError, UsageError
from tgen.runs import output_folder, saved_state
from tgen.storage import locks


def test_lock_recreates_a_folder_that_another_process_removed(tmp_path, monkeypatch):
    left = [3]

    def gone(*arguments, **named):
        if left[0]:
            left[0] -= 1
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return open(*arguments, **named)

    monkeypatch.setattr(locks, "open", gone, raising=False)
    with locks.lock(tmp_path / "m" / "LOCK"):
        assert (tmp_path / "m" / "LOCK").read_text() == str(os.getpid())
    left[0] = 1_000  # more than the number of tries
    with pytest.raises(FileNotFoundError), locks.lock(tmp_path / "n" / "LOCK"):
        pass


def test_failure_to_lock_does_not_mean_in_use(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks available"), locks.lock(tmp_path / "LOCK"):
        pass


def test_windows_locks_one_byte_after_the_content(tmp_path, monkeypatch):
    locked = set()

    def locking(fd: int, _mode: int, n: int) -> None:
        byte = os.fstat(fd).st_ino, os.lseek(fd, 0, os.SEEK_CUR), n
        assert byte[1] > 1 << 20
        if byte in locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        locked.add(byte)

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    monkeypatch.setattr(locks, "sys", SimpleNamespace(platform="win32"))
    with (
        locks.lock(tmp_path / "LOCK"),
        pytest.raises(LockedError, match=f"in use by process {os.getpid()}"),
        locks.lock(tmp_path / "LOCK"),
    ):
        pass


def test_refused_start_removes_nothing(finished, tmp_path):
    (finished / "training" / "run.json").unlink()
    before = contents(finished)
    with pytest.raises(UsageError, match="already contains a model"):
        next(runs.start(request(tmp_path)))
    assert contents(finished) == before


def test_failed_start_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saved_state, "save_tokens", full)
        with pytest.raises(OSError, match="No space"):
            list(runs.start(request(tmp_path)))
    assert not (tmp_path / "model").exists()


def test_run_removes_temporary_files_of_an_interrupted_one(finished, tmp_path):
    training = finished / "training"
    for start in (lambda: runs.start(request(tmp_path, overwrite=True)), lambda: resume(finished)):
        for folder in (finished, training, training / "state-00000014"):
            (folder / ".tmp-00deadbeef00").write_bytes(b"half")
        list(start())
        assert not list(finished.rglob(".tmp-*"))


def test_signal_during_locking_leaves_nothing(tmp_path, monkeypatch):
    open_locked, old_handler = locks._open_locked, signal.getsignal(signal.SIGTERM)

    def interrupted(path):
        file = open_locked(path)
        signal.raise_signal(signal.SIGTERM)
        return file

    monkeypatch.setattr(locks, "_open_locked", interrupted)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit) as stop, output_folder.lock_run(tmp_path / "out"):
            pass
        assert stop.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, old_handler)
    assert not (tmp_path / "out").exists()
