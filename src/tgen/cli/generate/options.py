"""The options of `tgen generate`."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tgen.cli.options import (
    Reader,
    adapter_option,
    draft_model_option,
    engine_options,
    json_option,
    model_option,
    nested,
    prompt_file_option,
    prompt_option,
    quiet_option,
)
from tgen.config import DEFAULT_BATCH_SIZE, Draft, EngineOptions, SamplingConfig
from tgen.config.option import option
from tgen.errors import TgenError, UsageError
from tgen.storage import files

MAX_SAMPLES = 1 << 16
CORPUS = "corpus"  # --words: of the training and held-out text
_MAX_FILE_BYTES = 1 << 20  # of a JSON schema or a grammar
_CHAT, _BATCH, _SPEED = "Chat", "Many prompts", "Performance"
_chat, _batch, _speed = (partial(option, panel=panel) for panel in (_CHAT, _BATCH, _SPEED))
# No path has these.
_GRAMMAR = re.compile(r"::=|^\s*(//.*\s+)*\??[A-Za-z_]\w*\s*:(\s+\S|\s*[^\s\\/])|\n")
_NOT_CACHED = "input_file chat interactive no_kv_cache"  # does not use a cache file
PANELS = (_CHAT, _BATCH, "Output", "Constraints and stopping", _SPEED)  # others follow


def _encode_all(texts: list[str]) -> list[bytes]:
    return [os.fsencode(text) for text in texts]


def _read_bias(item: str) -> tuple[bytes, float]:
    text, equals, number = item.rpartition("=")
    try:
        return os.fsencode(text), float(number if equals else "")
    except ValueError:
        hint = "use, for example, --bias ' king=2'"
        raise UsageError(f"--bias: not TEXT=NUMBER (got {item!r})", hint) from None


def _read_logit_bias(item: str) -> tuple[str, float]:
    i, equals, number = item.partition("=")
    try:
        return i, float(number if equals else "")
    except ValueError:
        hint = "use, for example, --logit-bias 11=-100"
        raise UsageError(f"--logit-bias: not ID=NUMBER (got {item!r})", hint) from None


def _read_choices(items: list[str]) -> list[bytes]:
    choices: list[str] = []
    for item in items:
        try:
            parsed = json.loads(item) if item.startswith("[") else None
        except (ValueError, RecursionError):
            parsed = [] if item.startswith('["') else None  # other text may start with a bracket
        if parsed is None:
            choices += item.split(",")
        elif parsed and all(isinstance(one, str) and one for one in parsed):
            choices += parsed
        else:
            message = f"--choices: not a JSON list of strings (got {item!r})"
            raise UsageError(message, """use, for example, --choices '["yes, please", "no"]'""")
    return _encode_all(choices)


class TextOfFile(str):
    """The text of a file that an option names."""

    path: Path


@contextmanager
def files_in_errors(sampling: Mapping[str, Any]) -> Iterator[None]:
    """Make errors about the text of a file name the file."""
    try:
        yield
    except UsageError as error:
        text, reason = sampling.get(error.field), error.message.removeprefix(f"{error.field}: ")
        if not isinstance(text, TextOfFile):
            raise
        message = f"{error.field} {text.path}: {reason}"
        raise UsageError(message, error.hint, field=error.field) from None


def _read_schema(given: str) -> str:
    if given.lstrip().startswith("{"):
        return given
    return _read_text("--json-schema", Path(given), json.loads, "pass a JSON schema file")


def _read_grammar(given: str) -> str:
    if _GRAMMAR.search(given):
        return given
    return _read_text("--grammar", Path(given), str, "pass a grammar in Lark or GBNF")


def _read_words(given: str) -> str:
    """Return the text of a file; CORPUS stays, since its text is known once the model is."""
    if given == CORPUS:
        return CORPUS
    if not given:
        raise UsageError("--words is empty", "name a text file")
    from tgen.corpus import read_text

    try:
        text, _ = read_text(given)
    except TgenError as error:
        raise UsageError(f"--words: {error.message}", "name a text file") from None
    if not text.strip():
        raise UsageError(f"--words {given}: the file is empty", "name a text file")
    result = TextOfFile(text.decode("utf-8", "surrogateescape"))
    result.path = Path(given)
    return result


def _read_text(flag: str, path: Path, check: Callable[[str], Any], hint: str) -> TextOfFile:
    """Return the text of a file that is not empty; `check` raises ValueError for other texts."""
    if not path.name:
        raise UsageError(f"{flag} is empty", hint)
    try:
        with files.open_stream(path) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"more than {_MAX_FILE_BYTES:,} bytes")
        text = content.decode("utf-8-sig")
        if not text.strip():
            raise ValueError("the file is empty")
        check(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {path}: {error}", hint) from None
    except TgenError as error:
        raise UsageError(f"{flag}: {error.message}", error.hint) from None
    result = TextOfFile(text)
    result.path = path
    return result


def option_notes(sampling: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each given string with a backslash and a letter, since shells keep them,
    and notes about the given JSON schema; none for an invalid one."""
    for name in ("stop", "ban", "require", "dry_breakers", "choices"):
        for text in sampling.get(name) or ():
            if found := re.search(rb"\\[nrt]", text):
                flag, escape = f"--{name.replace('_', '-')}", found[0].decode()
                shown = text.decode(errors="replace")
                yield (
                    f"warning: {flag} {shown!r}: {escape} is a backslash and a letter; "
                    f"in bash, write {flag} $'{shown}'"
                )
    if (schema := sampling.get("json_schema")) is not None:
        from tgen.generation.json_schema import translate

        with suppress(ValueError, RecursionError):  # reported when the schema is compiled
            yield from (
                f"note: --json-schema: {one}" for one in translate(json.loads(schema)).notes
            )


_TEXTS = Reader(list[str], _encode_all)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of `tgen generate`; `sampling` has the SamplingConfig fields that were given."""

    prompt: str | None = prompt_option("Text to continue; '-' reads stdin.")
    prompt_file: Path | None = prompt_file_option()
    model: str | None = model_option()
    adapter: str | None = adapter_option()
    sampling: dict[str, Any] = nested(
        SamplingConfig,
        stop=_TEXTS,
        ban=_TEXTS,
        require=_TEXTS,
        dry_breakers=_TEXTS,
        bias=Reader(list[str], lambda items: [_read_bias(item) for item in items]),
        logit_bias=Reader(list[str], lambda items: [_read_logit_bias(item) for item in items]),
        stop_token_ids=Reader(list[int], list),
        choices=Reader(list[str], _read_choices),
        json_schema=Reader(str, _read_schema),
        grammar=Reader(str, _read_grammar),
        words=Reader(str, _read_words),
        samplers=Reader(str, str),
        penalize_prompt=Reader(bool, lambda given: not given),
    )
    chat: bool = _chat(
        False,
        "Format the prompt as a user's message with the model's chat template.",
        "--chat",
        excludes="echo",
    )
    interactive: bool = option(
        False,
        "Interactive mode in a terminal.",
        "--interactive -i",
        excludes="input_file samples json_output jsonl echo stats",
    )
    system: str | None = _chat(
        None, "System message for --chat.", "--system", metavar="TEXT", needs="chat"
    )
    input_file: str | None = _batch(
        None,
        "File of prompts: one per line, or one JSON object per line with its own options; "
        "'-' reads stdin.",
        "--input",
        metavar="FILE",
        excludes="prompt prompt_file",
    )
    samples: int = _batch(1, "Number of texts per prompt.", "--samples", low=1, high=MAX_SAMPLES)
    batch_size: int = _batch(
        DEFAULT_BATCH_SIZE,
        "Number of sequences per batch.",
        "--batch-size",
        low=1,
    )
    json_output: bool = json_option(
        panel="", excludes="jsonl input_file samples", hint="use --jsonl for several texts"
    )
    jsonl: bool = option(
        False, "Write each text as one JSON object per line.", "--jsonl", panel="Output"
    )
    echo: bool = option(False, "Print the prompt before the text.", "--echo", panel="Output")
    stats: bool = option(
        False, "Report time to first token and tokens per second.", "--stats", panel="Output"
    )
    quiet: bool = quiet_option(panel="")
    engine: EngineOptions = engine_options()
    draft: Draft = _speed(
        "auto",
        "Speculative decoding with n-gram drafts, as many as are expected to save time; the text "
        "is the same.",
        "--draft",
    )
    draft_model: str | None = draft_model_option(excludes="draft=off no_kv_cache")
    no_kv_cache: bool = _speed(False, "Recompute the whole text for every token.", "--no-kv-cache")
    save_cache: Path | None = _speed(
        None,
        "Save the prompt's KV cache, for this model, --dtype and --cache-dtype.",
        "--save-cache",
        metavar="FILE",
        excludes=_NOT_CACHED,
    )
    load_cache: Path | None = _speed(
        None,
        "Load a KV cache that --save-cache wrote, for the start of the prompt.",
        "--load-cache",
        metavar="FILE",
        excludes=_NOT_CACHED,
    )

    def __post_init__(self) -> None:
        as_json = self.json_output or self.jsonl
        if self.stats and self.quiet and not as_json:
            message = "--stats cannot be combined with --quiet without --json"
            raise UsageError(message, "remove one of them")
        for name in ("logprobs", "explain"):
            if self.sampling.get(name) and not as_json:
                raise UsageError(f"--{name} needs JSON output", "add --json")
