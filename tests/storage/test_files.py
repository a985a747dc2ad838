"""Files and folders are replaced whole, and only the temporary files of dead processes removed."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tgen.errors import TgenError
from tgen.storage import files

LEFTOVER = ".tmp-0123456789ab"
KILLED = """
import os, sys
from pathlib import Path
from tgen.storage import files

def die(*_):
    os._exit(9)

target, call = Path(sys.argv[1]), sys.argv[2]
if call == "replace":
    os.replace = die
else:
    files.sync = die
files.publish_folder(target, {"a": b"new"})
"""


def kill_publishing(target, call):
    process = subprocess.run([sys.executable, "-c", KILLED, str(target), call], check=False)
    assert process.returncode == 9
    return [name for name in os.listdir(target.parent) if name.startswith(files.TEMPORARY)]


def test_next_write_beside_removes_what_a_killed_process_left(tmp_path):
    assert kill_publishing(tmp_path / "killed", "sync")
    files.publish(tmp_path / "other", b"x")
    assert os.listdir(tmp_path) == ["other"]


def test_folder_whose_replacement_was_killed_comes_back(tmp_path):
    files.publish_folder(tmp_path / "model", {"a": b"old"})
    assert len(kill_publishing(tmp_path / "model", "replace")) == 2
    assert not (tmp_path / "model").exists()
    files.publish(tmp_path / "other", b"x")
    assert sorted(os.listdir(tmp_path)) == ["model", "other"]
    assert (tmp_path / "model" / "a").read_bytes() == b"old"


def test_folder_that_was_replaced_stays_replaced(tmp_path):
    old = tmp_path / f"{LEFTOVER}-old"
    (old / "model").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "new").touch()
    files.publish(tmp_path / "other", b"x")
    assert sorted(os.listdir(tmp_path)) == ["model", "other"]
    assert os.listdir(tmp_path / "model") == ["new"]


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked")
def test_files_of_a_process_that_is_writing_stay(tmp_path):
    with files.replacing(tmp_path / "slow") as temporary:
        temporary.mkdir()
        files.publish(tmp_path / "fast", b"x")
        files.write_new(temporary / "a", b"y")
    assert (tmp_path / "slow" / "a").read_bytes() == b"y"


@pytest.mark.parametrize(
    "name",
    [
        ".tmp-my-notes.txt",
        ".tmp-my_notes",
        "tmp-0123456789ab",
        ".tmp-0123456789AB",
        ".tmp-0123",
        f"{LEFTOVER}.txt",
        f"{LEFTOVER}-old2",
    ],
)
def test_other_files_stay(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    files.publish(tmp_path / "x", b"x")
    files.remove_leftovers(tmp_path)
    assert (tmp_path / name).read_bytes() == b"mine"


def test_links_are_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").touch()
    (tmp_path / LEFTOVER).symlink_to(tmp_path / "mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / LEFTOVER).mkdir()
    (tmp_path / "folder" / LEFTOVER / "link").symlink_to(tmp_path / "mine")
    for folder in (tmp_path, tmp_path / "folder"):
        files.remove_leftovers(folder)
    assert os.listdir(tmp_path / "mine") == ["a"]
    assert (tmp_path / LEFTOVER).is_symlink()
    assert not os.listdir(tmp_path / "folder")


def test_without_locks_only_old_leftovers_are_removed(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / LEFTOVER).touch()
    files.publish(tmp_path / "x", b"x")
    assert (tmp_path / LEFTOVER).exists()
    os.utime(tmp_path / LEFTOVER, (0, 0))
    files.publish(tmp_path / "x", b"x")
    assert not (tmp_path / LEFTOVER).exists()


def test_failed_replacement_of_a_folder_keeps_it(tmp_path, monkeypatch):
    files.publish_folder(tmp_path / "model", {"a": b"old"})

    def fail(*_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="input/output error"):
        files.publish_folder(tmp_path / "model", {"a": b"new"})
    assert os.listdir(tmp_path) == ["model"]
    assert (tmp_path / "model" / "a").read_bytes() == b"old"


def test_output_makes_the_folders_above_it(tmp_path):
    path = tmp_path / "new" / "deep" / "x.json"
    assert not files.output_problem(path)
    files.write_output(path, b"x")
    assert path.read_bytes() == b"x"


def test_output_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    assert files.output_problem(tmp_path) == "is a directory"
    above = f"{tmp_path / 'file'} is not a directory"
    assert files.output_problem(tmp_path / "file" / "new" / "x") == above
    assert not files.output_problem(tmp_path / "file")
    assert not files.output_problem(tmp_path / "x")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not bind this user"
)
def test_output_in_a_folder_without_permission_is_a_problem(tmp_path):
    tmp_path.chmod(0o500)
    assert files.output_problem(tmp_path / "x") == f"{tmp_path} is not writable"


def test_failed_write_names_the_target(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        files.publish(tmp_path / "x", b"x")
    assert caught.value.filename == str(tmp_path / "x")
    with pytest.raises(OSError, match="No space left") as caught:
        files.publish_folder(tmp_path / "model", {"a": b"new"})
    assert caught.value.filename == str(tmp_path / "model")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_failed_write_to_a_device_names_it():
    with pytest.raises(OSError, match="No space left") as caught:
        files.write_output(Path("/dev/full"), b"x")
    assert caught.value.filename == "/dev/full"


def test_path_with_a_nul_character_is_refused():
    assert files.output_problem(Path("a\0b")) == "has a NUL character"
    with pytest.raises(TgenError, match="cannot be a path"):
        files.sha256(Path("a\0b"))
