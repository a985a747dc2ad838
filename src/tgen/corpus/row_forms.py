"""The forms in which people have rows, as one table, and their canonical rows.

A canonical row is {"text"}, {"prompt", "completion"} or {"messages"} with roles, contents and
weights of 0. A form is recognized by the keys of a row, whatever their case. Several parts of a
prompt, such as an instruction and its input, are joined by a blank line.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

from tgen.corpus.conversation import SHOWN, check_messages, pair_messages
from tgen.errors import CorpusError

Row = dict[str, Any]


class Form(NamedTuple):
    """Rows of a prompt and its answer: the keys of both, and the role that is learned."""

    name: str
    prompt: str
    answer: str
    context: tuple[str, ...] = ()  # optional keys whose values follow the prompt
    is_chat: bool = False  # becomes messages


_CONTEXT = ("input", "context")
# Lists of messages; the first key that a row has counts, before all other forms.
MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns")
FORMS = (
    Form("Alpaca", "instruction", "output", _CONTEXT, True),
    Form("Dolly", "instruction", "response", _CONTEXT, True),
    Form("instruction and answer", "instruction", "answer", _CONTEXT, True),
    Form("instruction and completion", "instruction", "completion", _CONTEXT, True),
    Form("text", "", "text"),
    Form("prompt and completion", "prompt", "completion"),
    Form("prompt and response", "prompt", "response", _CONTEXT),
    Form("prompt and answer", "prompt", "answer", _CONTEXT),
    Form("prompt and output", "prompt", "output", _CONTEXT),
    Form("prompt and generation", "prompt", "generation", _CONTEXT),
    Form("question and answer", "question", "answer", _CONTEXT),
    Form("question and response", "question", "response", _CONTEXT),
    Form("query and response", "query", "response", _CONTEXT),
    Form("query and answer", "query", "answer", _CONTEXT),
    Form("problem and solution", "problem", "solution"),
    Form("input and output", "input", "output"),
    Form("user and assistant", "user", "assistant"),
    Form("human and assistant", "human", "assistant"),
)
# A column with one of these names has the text if no form fits.
TEXTS = (
    *("text", "content", "contents", "body", "document", "article", "story", "poem", "lyrics"),
    *("transcript", "review", "message", "markdown", "code"),
)
_SYSTEM = ("system", "system_prompt", "system_message")
_PREFERENCES = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("chosen_response", "rejected_response"),
)
_LABELS = ("label", "kto_tag")  # true: a good answer, false: a bad one
_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatbot", "chatgpt", "ai"), "assistant"),
    **dict.fromkeys(("bing", "bard", "claude"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
# Of JSON, and bytes of tables; others are numbers.
_TYPES = {list: "a list", dict: "an object", bool: "true or false", bytes: "not UTF-8"}
_MAX_KEYS = 20  # in a note


class PreferenceError(CorpusError):
    """Rows of better and worse answers, which no run trains on."""


class LeftOut(NamedTuple):
    """Parts of the rows of a file that canonical rows lack."""

    messages: Counter[str]  # messages that had a key
    rows: Counter[str]  # rows that had tools
    keys: dict[str, None]  # of rows


def find_form(row: Any) -> str | None:
    """Return the name of a row's form, recognized by its keys; None for an unknown one.

    Raises PreferenceError.
    """
    if isinstance(row, str):
        return "text"
    if isinstance(row, list):
        return "messages" if row and all(map(is_message, row)) else None
    if not isinstance(row, dict):
        return None
    known = _recognize(tuple(row))
    _check_preferences(row, known)
    if known.messages is not None:
        messages = row[known.keys[known.messages]]
        first = messages[0] if isinstance(messages, list) and messages else None
        return "ShareGPT" if isinstance(first, dict) and "from" in first else known.messages
    return None if known.form is None else known.form.name


def find_answer(row: Row) -> str | None:
    """Return the key of a row's text, answer or messages; None for an unknown form."""
    known = _recognize(tuple(row))
    name = known.messages or (known.form and known.form.answer)
    return name and known.keys[name]


def is_message(value: Any) -> bool:
    """Return whether a value is a message: an object with a role and a content."""
    return (
        isinstance(value, dict)
        and not value.keys().isdisjoint(("role", "from"))
        and not value.keys().isdisjoint(("content", "value"))
    )


def map_row(row: Any, left_out: LeftOut) -> Row:
    """Return the canonical row of one whose form is known; count in `left_out` what it lacks.

    Raises CorpusError for an invalid value.
    """
    if isinstance(row, str):
        return {"text": row}
    if isinstance(row, list) and find_form(row):
        return _conversation(row, left_out)
    if not isinstance(row, dict):
        raise CorpusError(f"not a JSON object (got {shown(row)})", "remove the row")
    known = _recognize(tuple(row))
    _check_preferences(row, known)
    keys, form = known.keys, known.form
    note_unused(known.unused, left_out)
    if form is not None and not form.prompt and known.messages is None:
        return {"text": _to_text(row, keys[form.answer])}
    system = _optional(row, keys, _SYSTEM)
    if known.messages is not None:
        if _get(row, keys, "tools"):
            left_out.rows["tools"] += 1
        return _conversation(_parse_list(row[keys[known.messages]]), left_out, system)
    if form is None:
        raise CorpusError(
            f"the row {_has_keys(row)}, which are of no known form",
            "name the columns to train on: --columns NAME or --columns PROMPT,ANSWER",
        )
    prompt, answer = row[keys[form.prompt]], row[keys[form.answer]]
    if isinstance(prompt, list) or isinstance(answer, list):
        return _conversation(_turns(prompt, "user") + _turns(answer, "assistant"), left_out, system)
    context = [_optional(row, keys, (key,)) for key in form.context if key != form.prompt]
    prompt = join_parts([_to_text(row, keys[form.prompt]), *context])
    answer = _to_text(row, keys[form.answer])
    history = _get(row, keys, "history") or []
    if not (form.is_chat or system or history):
        return {"prompt": prompt, "completion": answer}
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise CorpusError("'history' is not a list of pairs", "remove it, or write pairs")
    pairs = [pair_messages(*pair) for pair in [*history, [prompt, answer]]]
    return _conversation(list(chain.from_iterable(pairs)), left_out, system)


def has_additions(row: Row, left_out: LeftOut) -> bool:
    """Return whether a row has a system message, earlier turns or tools; note unused keys."""
    known = _recognize(tuple(row))
    note_unused(known.unused, left_out)
    return any(row[key] for key in known.additions)


def map_columns(row: Any, columns: Sequence[str], left_out: LeftOut) -> Row:
    """Return the canonical row of the named columns: a text, or a prompt of all but the last and
    its answer. A column with messages becomes a conversation. Raises CorpusError."""
    if not isinstance(row, dict):
        raise CorpusError(f"not a JSON object (got {shown(row)})", "remove the row")
    keys = _recognize(tuple(row)).keys
    names = [name if name in row else keys.get(name.strip().lower(), name) for name in columns]
    for name in names:
        if name not in row:
            what = f"the row {_has_keys(row)}, not {name[:SHOWN]!r}"
            raise CorpusError(what, "name columns that all rows have")
    if any(isinstance(row[name], list) or is_message(row[name]) for name in names):
        roles = [*["user"] * (len(names) - 1), "assistant"]
        turns = [_turns(row[name], role) for name, role in zip(names, roles, strict=True)]
        return _conversation(list(chain.from_iterable(turns)), left_out)
    texts = [_to_text(row, name) for name in names]
    if len(texts) == 1:
        return {"text": texts[0]}
    return {"prompt": join_parts(texts[:-1]), "completion": texts[-1]}


def begins_with_answer(row: Row) -> bool:
    """Return whether the first message of a canonical conversation, besides a system message, is
    the assistant's."""
    roles = [message["role"] for message in row["messages"][:2] if message["role"] != "system"]
    return roles[:1] == ["assistant"]


def join_parts(parts: Sequence[str | None]) -> str:
    """Join the parts of a prompt that have text by blank lines."""
    return "\n\n".join(part for part in parts if part and part.strip()) or (parts[0] or "")


def shown_key(key: str) -> str:
    """Return the beginning of a key, without control characters."""
    return "".join(c if c.isprintable() else " " for c in key[:SHOWN])


def shown(value: Any) -> str:
    """Return the beginning of a value as one line for an error."""
    if value == b"":  # of a table
        return "bytes that are not UTF-8"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text[:SHOWN]) + ("..." if len(text) > SHOWN else "")


class _Keys(NamedTuple):
    """The form that the keys of a row imply."""

    keys: dict[str, str]  # in lower case -> as they are
    messages: str | None  # of MESSAGES
    form: Form | None
    preference: tuple[str, str] | None  # of _PREFERENCES
    label: str | None  # of _LABELS
    additions: tuple[str, ...]  # keys of a system message, earlier turns and tools
    unused: dict[str, None]  # the first keys of no use, as they are shown


@lru_cache(maxsize=8)  # the rows of a file have few sets of keys, which may be large
def _recognize(names: tuple[str, ...]) -> _Keys:
    keys = {name.strip().lower(): name for name in reversed(names)}
    form = next((f for f in FORMS if f.answer in keys and (not f.prompt or f.prompt in keys)), None)
    messages = next((key for key in MESSAGES if key in keys), None)
    used: tuple[str, ...] = (messages or "",)
    additions: tuple[str, ...] = (*_SYSTEM, "tools")
    if messages is None and form is not None:
        used = (form.prompt, form.answer, *form.context)
        additions = (*_SYSTEM, "history") if form.prompt else ()
    unused = (name for name in names if name not in map(keys.get, (*used, *additions)))
    return _Keys(
        keys,
        messages,
        form,
        next((pair for pair in _PREFERENCES if keys.keys() >= set(pair)), None),
        next((label for label in _LABELS if label in keys), None),
        tuple(keys[key] for key in additions if key in keys),
        dict.fromkeys(map(shown_key, islice(unused, _MAX_KEYS))),
    )


def _get(row: Row, keys: Mapping[str, str], key: str) -> Any:
    return row.get(keys.get(key, ""))


def _check_preferences(row: Row, known: _Keys) -> None:
    keys = known.keys
    prompts = ("prompt", "instruction", "question", *MESSAGES)
    prompt = next((keys[key] for key in prompts if key in keys), "")
    if known.preference is not None:
        if _has_user(row[keys[known.preference[0]]]):
            prompt = ""  # it is in the answers, too
        good, bad = (shown_key(keys[name]) for name in known.preference)
        raise PreferenceError(
            f"preference rows ({good} and {bad}), which tgen does not train on",
            f"train on the better answers alone: --columns {prompt + ',' if prompt else ''}{good}",
        )
    answer = known.messages or (known.form and known.form.prompt and known.form.answer)
    if answer and known.label and isinstance(row[keys[known.label]], bool):
        columns = keys[answer] if known.messages else f"{prompt or 'PROMPT'},{keys[answer]}"
        label = shown_key(keys[known.label])
        raise PreferenceError(
            f"preference rows ({label}: true or false), which tgen does not train on",
            f"remove the rows with false, then train with --columns {columns}",
        )


def _has_user(value: Any) -> bool:
    """Return whether a value is messages with one of the user."""
    messages = filter(is_message, value if isinstance(value, list) else ())
    return any(_ROLES.get(str(m.get("role", m.get("from"))).lower()) == "user" for m in messages)


def note_unused(keys: Iterable[str], left_out: LeftOut) -> None:
    """Add keys of rows that no canonical row has."""
    if len(left_out.keys) < _MAX_KEYS:
        left_out.keys.update(dict.fromkeys(islice(map(shown_key, dict.fromkeys(keys)), _MAX_KEYS)))


def _optional(row: Row, keys: Mapping[str, str], names: Sequence[str]) -> str | None:
    name = next((keys[name] for name in names if name in keys), None)
    return None if name is None or row[name] is None else _to_text(row, name)


def _to_text(row: Row, key: str) -> str:
    value = row[key]
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return json.dumps(value)
    if value is None:
        raise CorpusError(f"{key!r} is null", "remove the row, or write its text")
    raise CorpusError(
        f"{key!r} is {_type_name(value)} (expected a string)",
        "write its text as a string, or name other columns: --columns PROMPT,ANSWER",
    )


def _type_name(value: Any) -> str:
    return _TYPES.get(type(value), "a number")


def _has_keys(row: Row) -> str:
    names = ", ".join(repr(key[:SHOWN]) for key in list(row)[:10])
    return f"has the keys {names}{' and more' if len(row) > 10 else ''}" if row else "has no keys"


def _turns(value: Any, role: str) -> list[Any]:
    """Return the messages of a value: a list of them, one, or the text of one."""
    if is_message(value):
        return [value]
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _parse_list(value: Any) -> Any:
    """Return a list of messages, which the cell of a table has as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise CorpusError(
                f"the messages are not valid JSON (got {shown(value)})",
                "write them with json.dumps, or store the rows as JSON Lines",
            ) from None
    return value


def _conversation(messages: Any, left_out: LeftOut, system: str | None = None) -> Row:
    """Return a canonical conversation. Raises CorpusError."""
    if not isinstance(messages, list):
        raise CorpusError(f"not a list of messages (got {shown(messages)})", "write a list")
    canonical = [_message(number, message, left_out) for number, message in enumerate(messages, 1)]
    if system and (not canonical or canonical[0]["role"] != "system"):
        canonical.insert(0, {"role": "system", "content": system})
    while len(canonical) > 1 and canonical[0]["role"] == canonical[1]["role"] == "system":
        texts = [message["content"] for message in canonical[:2]]
        canonical[:2] = [{"role": "system", "content": "\n\n".join(texts)}]
    check_messages(canonical)
    return {"messages": canonical}


def _message(number: int, message: Any, left_out: LeftOut) -> Row:
    """Return a message with role, content and, if it is not learned, a weight of 0."""
    if not isinstance(message, dict):
        raise CorpusError(f"message {number} is not a JSON object", "write a role and a content")
    given = {key: value for key, value in message.items() if value not in (None, [], {})}
    given_role = given.pop("role", given.pop("from", None))
    role = _ROLES.get(str(given_role).lower())
    known = "system, user, assistant, tool"
    if given_role is None:
        is_empty = not message.keys().isdisjoint(("role", "from"))
        got = "an empty role" if is_empty else f"no role (it {_has_keys(message)})"
        raise CorpusError(
            f"message {number} has {got}",
            f"write a role: {known}; or add --as text to train on the file as it is",
        )
    if role is None:
        raise CorpusError(
            f"message {number} has the unknown role {str(given_role)[:SHOWN]!r}", f"use {known}"
        )
    if "tool_calls" in given or "function_call" in given:
        raise CorpusError(
            f"message {number} calls a tool, which tgen does not train on", "remove the row"
        )
    content = given.pop("content", given.pop("value", None))
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    if not isinstance(content, str):
        is_missing = content is None
        got = "no content" if is_missing else f"a content that is {_type_name(content)}"
        raise CorpusError(f"message {number} has {got}", "write its content as a string")
    weight = given.pop("weight", given.pop("train", 1))
    for key in given:
        left_out.messages[key] += 1
    canonical: Row = {"role": role, "content": content}
    if role == "assistant" and weight != 1:
        canonical["weight"] = int(weight) if isinstance(weight, bool) else weight
    return canonical


def _part(number: int, part: Any) -> str:
    """Return a text part of a message's content."""
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise CorpusError(
            f"message {number} has a part of type {str(kind)[:SHOWN]}, which is not text",
            "remove the row, or write its text",
        )
    return text
