"""The user's cache directory: only this user may write to it, and every file in it can be lost."""

import os
import stat
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Return tgen's directory `name` in the user's cache directory; None without a home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    base = Path(home) if home else Path(os.path.expanduser("~")) / ".cache"
    return base / "tgen" / name if base.is_absolute() else None


def is_private(folder: Path) -> bool:
    """Whether only this user can write to a directory. Creates it if it is missing."""
    if not hasattr(os, "getuid"):
        return False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return False
    only_ours = state.st_uid == os.getuid() and not state.st_mode & 0o022
    return only_ours and stat.S_ISDIR(state.st_mode)


def is_own(path: Path) -> bool:
    """Whether a path is a regular file, not a link, that only this user can write."""
    status = path.lstat()
    only_ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return only_ours and stat.S_ISREG(status.st_mode)
