"""What `tgen bench` was asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgen.errors import UsageError

ENGINES = ("kernels", "torch")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """None: what is usual."""

    path: Path
    device: str
    trials: int
    seed: int
    engines: list[Any] | None
    weights: list[Any] | None
    threads: list[int] | None
    batches: list[int] | None
    prompts: list[int] | None
    gens: list[int] | None
    pairs: list[tuple[int, int]] | None
    depths: list[int] | None
    lengths: list[int] | None
    limits: bool
    output: str
    save: Path | None
    quiet: bool

    @property
    def names_tests(self) -> bool:
        """Whether it says which tests there are."""
        named = (self.prompts, self.gens, self.pairs, self.depths, self.batches)
        return any(one is not None for one in named)

    def only(self, name: str, usual: Any) -> Any:
        """The one value of a list that a study takes one of. Raises UsageError for several."""
        values = getattr(self, name) or [usual]
        if len(values) > 1:
            raise UsageError(
                f"{len(values)} {name} were given, this looks at one", "give a single value"
            )
        return values[0]
