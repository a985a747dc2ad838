"""All errors that a user can cause, as one tree of exceptions.

    TgenError                     exit status 1: an expected failure
    ├── UsageError                2: an option or a setting with an invalid value
    │   └── ContextError             a text that the model's context has no room for
    ├── CorpusError               1: the training text
    ├── TokenizerError            1: tokenizer.json
    ├── ModelError                1: a model directory or its tensors
    ├── TrainingError             1: a run that cannot start or continue
    │   └── DivergedError            its loss or weights are not finite
    ├── LockedError               75: another process owns the run
    └── RankError                 the error of another rank, already printed

An error has two lines: `message` names what is wrong and the value, `hint` says what to do.
`suggest` returns a hint for a misspelled name.
"""

from collections.abc import Iterable

_MAX_LENGTH = 1000  # characters of a message or hint, which may contain a value of any size


class TgenError(Exception):
    """Base of all expected failures; `message` is one line, and `hint` is one line or empty.

    Beyond 1,000 characters, the middle is cut out.
    """

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = _shorten(message), _shorten(hint)
        super().__init__(self.message)


class UsageError(TgenError):
    """An invalid value of a setting; `field` has the configuration fields it names, if any."""

    exit_status = 2

    def __init__(self, message: str, hint: str = "", *, field: str = "") -> None:
        super().__init__(message, hint)
        self.field = field


class ContextError(UsageError):
    """A text that the model's context has no room for."""


class CorpusError(TgenError):
    """A training text that cannot be read or is too short."""


class TokenizerError(TgenError):
    """A tokenizer that cannot be read or has an unsupported type."""


class ModelError(TgenError):
    """A model directory that is missing, damaged, or has an unsupported family."""


class TrainingError(TgenError):
    """A training run that cannot start or continue."""


class DivergedError(TrainingError):
    """A training run whose loss or weights are not finite."""


class LockedError(TgenError):
    """A run directory that another living process owns."""

    exit_status = 75


class RankError(TgenError):
    """The first error of any rank, raised on the others; rank 0 has printed it."""

    def __init__(self, message: str, hint: str, exit_status: int) -> None:
        super().__init__(message, hint)
        self.exit_status = exit_status


def _shorten(text: str) -> str:
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[: _MAX_LENGTH // 2]} ... {text[-_MAX_LENGTH // 3 :]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is Python's or one of torch's two out-of-memory errors."""
    is_known_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_known_type or "allocate memory" in str(error)


def describe_os_error(error: OSError, where: str = "") -> str:
    """Return an error of the operating system with its file or, without one, `where`."""
    reason = error.strerror or " ".join(map(str, error.args))  # some libraries set no number
    where = error.filename or where
    return f"{where}: {reason}" if where else reason


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the hint for a misspelled name, or "" if no known one is similar."""
    from difflib import get_close_matches

    similar = get_close_matches(name, known, 1, cutoff=0.75)  # another word is no misspelling
    return f"did you mean {similar[0]}?" if similar else ""
