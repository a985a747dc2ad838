"""The options of `tgen models`. Does not import torch."""

from dataclasses import dataclass
from typing import Literal

from tgen.cli.options import json_option, quiet_option
from tgen.config.option import check_ranges, option
from tgen.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """The options of `tgen models`."""

    action: Literal["list", "rm"] = option(
        "list",
        "list: show all models that can be found by name. rm: remove models.",
        argument=True,
        metavar="[list|rm]",
    )
    names: list[str] = option(
        default_factory=list,
        help_text="Models to remove: names in ./models or the data directory, or paths.",
        argument=True,
        metavar="[NAME]...",
    )
    yes: bool = option(False, "Remove without asking.", "--yes -y")
    check: bool = option(
        False, "Checksum test of the cached weights; damaged files are removed.", "--check"
    )
    clear_cache: bool = option(False, "Remove the cached weights.", "--clear-cache")
    json: bool = json_option("Write the list as one JSON object.", panel="")
    quiet: bool = quiet_option(panel="")

    def __post_init__(self) -> None:
        check_ranges(self)
        exclusive = {
            "--clear-cache": self.clear_cache,
            "--check": self.check,
            "--json": self.json,
            "rm": self.action == "rm",
        }
        given = [name for name, is_given in exclusive.items() if is_given]
        if len(given) > 1:
            message = f"{given[0]} cannot be combined with {given[1]}"
            raise UsageError(message, f"remove {given[0]}")
        if self.action == "rm":
            if not self.names:
                raise UsageError("no model to remove", "name it: tgen models rm NAME")
        elif self.names:
            raise UsageError(
                f"tgen models list takes no name (got {self.names[0]!r})",
                "remove it; tgen inspect --view model describes a model",
            )
        elif self.yes:
            raise UsageError("--yes needs rm", "remove --yes, or run: tgen models rm NAME --yes")
