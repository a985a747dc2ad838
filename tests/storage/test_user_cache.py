"""The user's cache directory."""

import os
import stat

from tgen.storage.user_cache import is_private


def test_only_a_private_directory_is_used_under_any_umask(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "kernels"
    before = os.umask(0o002)
    try:
        assert is_private(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(folder)
    assert not is_private(tmp_path / "link")
    folder.chmod(0o775)
    assert not is_private(folder)
    folder.chmod(0o755)
    assert is_private(folder)
    (tmp_path / "file").write_bytes(b"")
    assert not is_private(tmp_path / "file" / "kernels")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert not is_private(folder)
