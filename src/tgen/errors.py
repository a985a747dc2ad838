"""Everything that a user can cause, as one tree of exceptions.

    TgenError                     exit status 1: an expected failure
    ├── UsageError                2: an option or a setting with an impossible value
    ├── CorpusError               1: the training text
    ├── TokenizerError            1: tokenizer.json
    ├── ModelError                1: a model directory or its tensors
    ├── TrainingError             1: a run that cannot go on
    │   └── DivergedError            its numbers are no longer finite
    ├── LockedError               75: another process owns the run
    └── RankError                 whatever ended one of several ranks; it has been told

An error has two lines: `message` says what is wrong with which value, `hint` what to do.
"""


class TgenError(Exception):
    """Base of all expected failures: `message` is one line, `hint` (may be empty) another."""

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TgenError):
    """A setting whose value cannot be used; `field`: its name in a configuration, if it has one."""

    exit_status = 2

    def __init__(self, message: str, hint: str = "", *, field: str = "") -> None:
        super().__init__(message, hint)
        self.field = field


class CorpusError(TgenError):
    """Training text that cannot be read or is not enough to train on."""


class TokenizerError(TgenError):
    """A tokenizer that cannot be read or is of a kind that tgen does not know."""


class ModelError(TgenError):
    """A model directory that is missing, damaged, or not one of the known families."""


class TrainingError(TgenError):
    """A training run that cannot start or go on."""


class DivergedError(TrainingError):
    """A run whose numbers are no longer finite."""


class LockedError(TgenError):
    """The run directory belongs to another living process."""

    exit_status = 75


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or torch, which has two ways of saying so, found no memory."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "allocate memory" in str(error)


class RankError(TgenError):
    """What ended the ranks of a piece of work, wherever it happened; it has been told."""

    def __init__(self, message: str, hint: str, exit_status: int) -> None:
        super().__init__(message, hint)
        self.exit_status = exit_status
