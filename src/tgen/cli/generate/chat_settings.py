"""The sampling options of an interactive session, and the seeds of its turns."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from tgen.cli import console
from tgen.cli.generate.options import GenerateOptions, files_in_errors, option_notes
from tgen.cli.options import flags_in_errors, read_option
from tgen.config import SamplingConfig

_DEFAULT = "default"  # the value that resets an option
_N_TOP = 5  # tokens per position whose probabilities are stored


class Settings:
    """The sampling options of a session, and the seeds of its turns."""

    def __init__(
        self, options: GenerateOptions, make: Callable[[dict[str, Any]], SamplingConfig]
    ) -> None:
        """`make` returns the configuration of given fields, with the defaults of the model."""
        self._options, self._make = options, make
        self._sampling = make(options.sampling)
        self.n_turns = 0  # since the seed was set

    @property
    def seed(self) -> int:
        """The seed of the next turn."""
        from tgen.generation.random_numbers import row_seed

        return row_seed(self._sampling.seed, self.n_turns)

    @property
    def first_seed(self) -> int:
        """The seed that the seeds of all turns come from."""
        return self._sampling.seed

    def next_turn(self) -> SamplingConfig:
        """Return the configuration of the next turn."""
        sampling = replace(self._sampling, seed=self.seed, logprobs=_N_TOP)
        self.n_turns += 1
        return sampling

    def set(self, name: str, value: str, check: Callable[[SamplingConfig], object]) -> None:
        """Set an option as its flag does; `check` raises UsageError if it cannot be used."""
        field, parsed = read_option(GenerateOptions, "sampling", name, value)
        given = self._options.sampling | {field: parsed}
        if value == _DEFAULT:
            del given[field]
        with flags_in_errors(GenerateOptions), files_in_errors(given):
            options = replace(self._options, sampling=given)
            sampling = self._make(given)
            check(sampling)
        if field == "seed":
            self.n_turns = 0
        self._options, self._sampling = options, sampling
        for note in option_notes({field: given.get(field)}):
            console.print_line(note)

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from tgen's defaults, by their names, without the seed."""
        default = SamplingConfig()
        values = {one.name: getattr(self._sampling, one.name) for one in fields(SamplingConfig)}
        return {
            name.replace("_", "-"): value
            for name, value in values.items()
            if name != "seed" and value != getattr(default, name)
        }

    def find(self, name: str) -> tuple[str, Any]:
        """Return an option's name and value; raises UsageError for an unknown name."""
        field, _ = read_option(GenerateOptions, "sampling", name, _DEFAULT)
        return field.replace("_", "-"), getattr(self._sampling, field)
