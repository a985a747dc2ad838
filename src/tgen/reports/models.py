"""A model that was found on disk."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """A model as its files describe it; weights are not read."""

    name: str
    path: str
    found_by: str  # where it was found, see `checkpoint.model_lookup`
    is_default: bool  # whether it is the one that commands use without a name
    adapter_of: str | None  # the base model that an adapter names; None: not an adapter
    rank: int | None  # of an adapter
    family: str | None  # of an adapter, the base's. None here and below: unknown, see `problem`
    n_parameters: int | None
    dtype: str | None  # of most of the weights
    context_length: int | None
    n_bytes: int  # of all its files on disk
    modified: float | None  # when the weights were written, in seconds since 1970
    problem: str  # why it cannot be loaded; "" if nothing is known
