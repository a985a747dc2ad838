"""Turn a dataclass of options into a Typer command, and read values that commands share.

Each field declared with `tgen.config.option.option` becomes one parameter. A field made by `nested`
stands for the options of another dataclass: those given on the command line are collected in a
dict, so that "not given" needs no comparison with a default. A prompt comes from `--prompt` or
stdin.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from tgen.cli import console
from tgen.config import DEFAULT_ENGINE, EngineOptions
from tgen.config.option import check_combinations, check_ranges, option
from tgen.errors import TgenError, UsageError, suggest
from tgen.storage.files import output_problem


def prompt_option(help_text: str) -> Any:
    """Declare `--prompt`."""
    return option(None, help_text, "--prompt -p", metavar="TEXT", shown_default="read from stdin")


def prompt_file_option(**changes: Any) -> Any:
    """Declare `--prompt-file`."""
    help_text = "File with the prompt: a text or a document."
    return option(None, help_text, "--prompt-file", metavar="FILE", excludes="prompt", **changes)


def read_prompt(prompt: str | None, file: Path | None = None) -> bytes:
    """Return the prompt's bytes; stdin is read only without a prompt and file, or if it is '-'."""
    if file is not None:
        from tgen.corpus import read_text

        with console.late_progress("reading the prompt") as update:
            text, notes = read_text(str(file), update)
        for note in notes:
            console.print_status(f"note: {note}")
        return text
    if prompt is not None and prompt != "-":
        return os.fsencode(prompt)
    if sys.stdin is None or (sys.stdin.isatty() and prompt is None):
        raise UsageError("no prompt", 'pass --prompt "TEXT", or pipe text in')
    from tgen.documents.kinds import byte_order_mark

    content = sys.stdin.buffer.read()
    codec, n_mark = byte_order_mark(content)
    content = content[n_mark:]
    if codec in ("", "utf-8"):
        return content
    console.print_status(f"note: the prompt is read as {codec}, by its byte order mark")
    return content.decode(codec, "replace").encode()


class Reader(NamedTuple):
    """The way to read a field from the command line: its Typer type, and a converter."""

    type: Any
    read: Callable[[Any], Any]


def nested(
    options_type: type,
    *,
    only: Collection[str] = (),
    panel: str | None = None,
    help_texts: Mapping[str, str] | None = None,
    **readers: Reader,
) -> Any:
    """Declare a field that collects the given options of another dataclass in a dict.

    `only` are the names of its fields that become options, by default all; `panel` is the panel of
    the help that lists them, by default each option's own; `help_texts` replace the help of some.
    """
    metadata = {"nested": options_type, "readers": readers, "only": only, "panel": panel}
    return field(default_factory=dict, metadata=metadata | {"help_texts": help_texts or {}})


def engine_options(**help_texts: str) -> Any:
    """Declare a field with the EngineOptions; `help_texts` replace the help of some of them."""
    metadata = {"nested": EngineOptions, "help_texts": help_texts}
    return field(default=DEFAULT_ENGINE, metadata=metadata)


def reading_options() -> Any:
    """Declare a field that collects the given options of Reading."""
    from tgen.config.input_files import Reading, split_names

    return nested(Reading, columns=Reader(str, split_names))


def model_option(help_text: str = "", flags: str = "--model -m", **changes: Any) -> Any:
    """Declare `--model`, or another option that takes a model."""
    details: dict[str, Any] = {
        "metavar": "NAME",
        "shown_default": "the newest directory in ./models, else the shipped model",
        "autocompletion": _complete_model,
    }
    help_text = help_text or (
        "Model path, or name in ./models, the data directory, or the caches of transformers, "
        "LM Studio, llama.cpp and Ollama."
    )
    return option(None, help_text, flags, **details | changes)


def adapter_option(**changes: Any) -> Any:
    """Declare `--adapter`."""
    details: dict[str, Any] = {"metavar": "DIR", "shown_default": ""}
    help_text = (
        "LoRA adapter in PEFT's format, used with --model or, without it, with its own base."
    )
    return option(None, help_text, "--adapter", **details | changes)


def draft_model_option(**changes: Any) -> Any:
    """Declare `--draft-model`."""
    help_text = (
        "Smaller model with the same tokenizer, which drafts tokens for speculative decoding; the "
        "text is the same."
    )
    details: dict[str, Any] = {"shown_default": "", "panel": "Performance"}
    return model_option(help_text, "--draft-model", **details | changes)


def json_option(
    help_text: str = "Write one JSON object to stdout.", panel: str = "Output", **changes: Any
) -> Any:
    """Declare `--json`."""
    return option(False, help_text, "--json", panel=panel, **changes)


def quiet_option(panel: str = "Output") -> Any:
    """Declare `--quiet`."""
    return option(False, "Print only errors to stderr.", "--quiet -q", panel=panel)


class _Parameter(NamedTuple):
    """A parameter of a command, and where its value goes."""

    parameter: inspect.Parameter
    details: Mapping[str, Any]  # the field's metadata
    read: Callable[[Any], Any] | None
    field: str
    owner: str  # name of the nested field, or ""

    @property
    def flag(self) -> str:
        """The main spelling of an option; the name of an argument."""
        spellings = self.details.get("flags") or [self.field]
        return str(spellings[0]).partition("/")[0]

    @property
    def kind(self) -> Any:
        """The type of its values, without None."""
        kind, _ = get_args(self.parameter.annotation)
        return _without_none(kind)


def make_command(
    run: Callable[[Any], None], options_type: type, panels: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Make a function for Typer from `run`, which takes the options as an `options_type`.

    In the help, the main panel and `panels` come first, the others in the order of the options.
    """
    parameters = list(_parameters(options_type))
    titles = ["", *panels, *(one.details.get("panel", "") for one in parameters)]
    parameters.sort(key=lambda one: titles.index(one.details.get("panel", "")))

    def command(context: typer.Context, **values: Any) -> None:
        with flags_in_errors(options_type):
            given = _collect(parameters, context, values)
            if "engine" in given:
                given["engine"] = EngineOptions(**given["engine"])
            options = options_type(**given)
            _check(options)
            console.quiet = options.quiet
            run(options)

    command.__doc__, command.__name__ = help_text(run), run.__name__
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    signature = inspect.Signature([context, *(one.parameter for one in parameters)])
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def help_text(run: Callable[..., Any]) -> str:
    """Return a docstring as help whose paragraphs Typer can reflow at any width."""
    paragraphs = inspect.cleandoc(run.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _parameters(
    options_type: type, owner: str = "", within: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[_Parameter]:
    """Yield the parameters of options; `within` is the metadata of the nested field `owner`."""
    hints, only = get_type_hints(options_type), within.get("only")
    for one in fields(options_type):
        details = one.metadata
        if "nested" in details:
            yield from _parameters(details["nested"], one.name, details)
        elif (details.get("flags") or "argument" in details) and (not only or one.name in only):
            if panel := within.get("panel"):
                details = MappingProxyType({**details, "panel": panel})
            reader = within.get("readers", {}).get(one.name) or details.get("reader")
            default = one.default
            required = one.default is MISSING is one.default_factory and not owner
            if reader or not isinstance(default, (int, float, str)):
                default = inspect.Parameter.empty if required and not reader else None
            shown = details.get("shown_default", default is not None and not required)
            how = {name: details[name] for name in ("metavar", "autocompletion") if name in details}
            text = within.get("help_texts", {}).get(one.name, details["help"])
            how |= {"help": text, "show_default": shown or False}
            how["rich_help_panel"] = details.get("panel")
            info = (
                typer.Argument(**how)
                if "argument" in details
                else typer.Option(*details["flags"], **how)
            )
            typed = inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[reader.type if reader else hints[one.name], info],
            )
            read = reader.read if reader else None
            yield _Parameter(typed, details, read, field=one.name, owner=owner)


def read_option(options_type: type, owner: str, name: str, text: str) -> tuple[str, Any]:
    """Return the field and the value of an option of the nested field `owner`, from its flag's name
    and its value; a switch takes true or false. Raises UsageError as the flag does."""
    word = name.lstrip("-").replace("_", "-")
    by_name: dict[str, _Parameter] = {}
    others: set[str] = set()
    for one in _parameters(options_type):
        spellings = [one.field.replace("_", "-"), *one.details.get("flags", ())]
        names = [spelling.lstrip("-") for spelling in spellings]
        if one.owner == owner:
            by_name |= dict.fromkeys(names, one)
        else:
            others.update(names)
    if word not in by_name:
        if word in others:
            raise UsageError(f"{word} cannot be set here", "set it on the command line")
        hint = suggest(word, by_name) or "run `tgen generate --help` for a list"
        raise UsageError(f"unknown option {name[:60]!r}", hint)
    one = by_name[word]
    if text == "default":
        return one.field, None
    if one.kind is not bool:
        return one.field, _convert(one, [text] if get_origin(one.kind) is list else text)
    if text not in ("true", "false"):
        message, hint = f"{word}: invalid value {text!r:.60}", f"set {word} to true or false"
        raise UsageError(message, hint)
    is_on = text == "true"
    return one.field, is_on if word == one.field.replace("_", "-") else _convert(one, is_on)


def _collect(
    parameters: list[_Parameter], context: typer.Context, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of the options; of nested options, only those given."""
    options: dict[str, Any] = {one.owner: {} for one in parameters if one.owner}
    for one in parameters:
        name = one.parameter.name
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            group = options[one.owner] if one.owner else options
            group[one.field] = _convert(one, values[name])
    return options


def _convert(one: _Parameter, value: Any) -> Any:
    """Return a value as the field's type; raise UsageError for text that is not of this type.

    Typer would convert it with pydantic, which takes longer to import than tgen to start.
    """
    if get_origin(one.kind) is list:
        [kind] = get_args(one.kind)
        value = [_parse(one.flag, kind, item) for item in value]
    else:
        value = _parse(one.flag, one.kind, value)
    return one.read(value) if one.read else value


def _parse(flag: str, kind: Any, value: Any) -> Any:
    """Return one value as its type; a whole number may have zeros after a decimal point."""
    if isinstance(value, bool):
        return value
    if kind is Path and value == "":  # it would be the current directory
        raise UsageError(f"{flag}: the path is empty", "name a file or a directory")
    choices = _choices(kind)
    try:
        if kind is int:
            return int(re.sub(r"(?<=\d)\.0+$", "", str(value).strip()))
        return choices[str(value)] if choices else kind(value)
    except (KeyError, ValueError):
        names = {int: "a whole number", float: "a number"}
        expected = names.get(kind) or f"one of {', '.join(choices)}"
        message, hint = f"{flag}: invalid value {value!r}", f"set {flag} to {expected}"
        raise UsageError(message, hint) from None


def _choices(kind: Any) -> dict[str, Any]:
    """Return the values of a Literal or an enum by their spelling; of other types none."""
    is_enum = isinstance(kind, type) and issubclass(kind, Enum)
    values = kind if is_enum else get_args(kind) if get_origin(kind) is Literal else ()
    return {str(one.value if is_enum else one): one for one in values}


def _without_none(kind: Any) -> Any:
    """Return X for X | None."""
    types = get_args(kind)
    return next(one for one in types if one is not NoneType) if NoneType in types else kind


@contextmanager
def flags_in_errors(options_type: type) -> Iterator[None]:
    """Make errors name flags instead of fields."""
    try:
        yield
    except UsageError as error:
        raise name_flags(options_type, error) from None


def name_flags(options_type: type, error: TgenError) -> TgenError:
    """Return the error with flags instead of field names; other errors stay unchanged."""
    named = error
    for name in error.field.split() if isinstance(error, UsageError) else ():
        if flag := flag_of(options_type, name):
            pattern = rf"(?<![\w-]){re.escape(name)}(?![\w-])"
            texts = (re.sub(pattern, flag, text, count=1) for text in (named.message, named.hint))
            named = UsageError(*texts)
    return named


def flag_of(options_type: type, name: str) -> str:
    """Return the main flag of a field; "" if it has none."""
    for one in fields(options_type):
        if "nested" in one.metadata and (flag := flag_of(one.metadata["nested"], name)):
            return flag
        if one.name == name and one.metadata.get("flags"):
            return str(one.metadata["flags"][0]).partition("/")[0]
    return ""


def _check(options: Any) -> None:
    """Check the values of a command's options, and which are combined; raise UsageError."""
    check_ranges(options)
    check_combinations(_given(options), partial(_shown, options))


def _given(options: Any) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of the fields with other values than the default, also as NAME=VALUE."""
    given: dict[str, Mapping[str, Any]] = {}
    for one in fields(options):
        value = getattr(options, one.name)
        if isinstance(value, dict):
            inner = fields(one.metadata["nested"])
            given |= {field.name: field.metadata for field in inner if field.name in value}
            given |= {f"{name}={inner_value}": {} for name, inner_value in value.items()}
        elif value not in (one.default, []):
            given |= {one.name: one.metadata, f"{one.name}={value}": {}}
    return given


def _shown(options: Any, name: str) -> str:
    """Return NAME or NAME=VALUE as typed on the command line."""
    name, _, value = name.partition("=")
    flag = flag_of(type(options), name)
    return f"{flag} {value}".strip() or name


def _complete_model(incomplete: str) -> list[str]:
    from tgen.checkpoint.model_lookup import list_models

    names = [name for name in list_models() if name.isprintable()]
    return [name for name in names if name.startswith(incomplete)]


def check_output_file(flag: str, path: Path) -> None:
    """Raise UsageError if a file cannot be written to `path`, or would replace part of a model."""
    from tgen.checkpoint.model_files import belongs_to_a_model

    problem = output_problem(path)
    if not problem and belongs_to_a_model(path):
        problem = "is a file of a model"
    if problem:
        raise UsageError(f"{flag} {path}: {problem}", "name another file")


def parse_size(option_name: str, text: str) -> int:
    """Parse 200MB, 1GiB or 5000000 into bytes.

    Raises UsageError for anything else, and for a number so small that its unit must be missing.
    """
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
    pattern = r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]I?|)B?"
    match = re.fullmatch(pattern, text.strip().upper(), re.ASCII)
    n_bytes = int(float(match[1]) * units[match[2]]) if match else 0
    example = "use a size such as 200MB or 2GiB"
    if not n_bytes:
        raise UsageError(f"{option_name}: not a size (got {text!r})", example)
    if text.strip().isdigit() and n_bytes < 10**6:
        raise UsageError(f"{option_name}: the unit is missing (got {text!r})", example)
    return n_bytes


def parse_count(option_name: str, text: str) -> int:
    """Parse 250k, 1.5M or 250000 into a number; raise UsageError for anything else."""
    units = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([KMB]?)", text.strip().upper(), re.ASCII)
    if not match:
        hint = "use digits and, for thousands or millions, k or M: 250k"
        raise UsageError(f"{option_name}: invalid value {text!r:.60}", hint)
    return round(float(match[1]) * units[match[2]])


def parse_settings(settings: list[str]) -> dict[str, str]:
    """Parse FIELD=VALUE pairs; the last one wins. Raises UsageError for a pair without `=`."""
    pairs = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            hint = "use, for example, --set n_layers=8"
            raise UsageError(f"--set: not FIELD=VALUE (got {setting!r})", hint)
        pairs[name.strip().replace("-", "_")] = value.strip()
    return pairs
