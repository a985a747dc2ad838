"""The options of `tgen tokenize`. Does not import torch."""

from dataclasses import dataclass

from tgen.cli.options import json_option, model_option, quiet_option
from tgen.config.option import check_ranges, option
from tgen.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """The options of `tgen tokenize`."""

    files: list[str] = option(
        default_factory=list,
        help_text="Files, directories, glob patterns, or - for stdin; by default stdin.",
        argument=True,
        metavar="FILE",
    )
    prompt: str | None = option(
        None, "Text to tokenize instead of files.", "--prompt -p", metavar="TEXT"
    )
    model: str | None = model_option()
    ids: bool = option(False, "Write only the ids, separated by spaces.", "--ids")
    count: bool = option(False, "Write only the numbers of tokens and bytes.", "--count")
    decode: bool = option(
        False, "Write the text of ids, which are separated by spaces or commas.", "--decode"
    )
    json: bool = json_option("Write one JSON object per text.", panel="")
    quiet: bool = quiet_option(panel="")

    def __post_init__(self) -> None:
        check_ranges(self)
        forms = {"--ids": self.ids, "--count": self.count, "--decode": self.decode}
        given = [flag for flag, is_given in (forms | {"--json": self.json}).items() if is_given]
        if len(given) > 1 and given != ["--count", "--json"]:
            raise UsageError(f"{given[0]} cannot be combined with {given[1]}", "remove one of them")
        if self.files and self.prompt is not None:
            raise UsageError("--prompt cannot be combined with files", "remove one of them")
