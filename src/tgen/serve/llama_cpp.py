"""llama.cpp's endpoints for tokens, the chat template and properties."""

from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from tgen.errors import ModelError
from tgen.loaded_model import LoadedModel
from tgen.serve.json_body import JsonObject, Unicode, is_ids, validate
from tgen.serve.preparation import check_ids, find_chat_format
from tgen.serve.text_request import ChatRequest, to_request
from tgen.version import __version__


def _check_ids(value: Any) -> list[int]:
    if not is_ids(value):
        raise ValueError("a list of token ids")
    return value


class _Content(JsonObject, extra="forbid"):
    content: Unicode
    add_special: bool = False
    parse_special: Literal[False] = False  # control tokens in a text remain text
    with_pieces: bool = False


class _Tokens(JsonObject, extra="forbid"):
    tokens: Annotated[list[int], PlainValidator(_check_ids)]


def tokenize(model: LoadedModel, _: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of a text, after the tokens that start a document if `add_special` is set.

    A piece that is not UTF-8 is a list of bytes. Raises HttpError and UsageError.
    """
    request = validate(_Content, values)
    encode = model.tokenizer.encode_prompt if request.add_special else model.tokenizer.encode
    ids = encode(request.content.encode())
    if not request.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": i, "piece": _piece(model.tokenizer.token_bytes(i))} for i in ids]}


def _piece(data: bytes) -> str | list[int]:
    with suppress(UnicodeDecodeError):
        return data.decode()
    return list(data)


def detokenize(model: LoadedModel, _: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the text of ids; raises HttpError."""
    tokens = validate(_Tokens, values).tokens
    check_ids(tokens, model.tokenizer.vocab_size, "tokens")
    return {"content": model.tokenizer.decode(tokens).decode(errors="replace")}


def apply_template(model: LoadedModel, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the text of a conversation up to the start of the answer, with control tokens by name.

    Raises HttpError, UsageError and ModelError.
    """
    request = to_request(values, ChatRequest, name)
    prompt = find_chat_format(model, request).write(
        request.conversation,
        request.shown_tools,
        prompt=request.starts_answer,
        continued=request.is_continued,
    )
    return {"prompt": prompt}


def properties(model: LoadedModel, name: str, _: dict[str, Any]) -> dict[str, Any]:
    """Return the body of /props."""
    template = ""
    with suppress(ModelError):
        template = model.chat_format.template.source
    return {
        "default_generation_settings": {"n_ctx": model.engine.context_length},
        "model_alias": name,
        "chat_template": template,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"tgen {__version__}",
    }
