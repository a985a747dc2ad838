"""The plugin for `llm`: every model that tgen finds is the model tgen/NAME.

Each `llm` command imports this module, so tgen itself is imported where it is needed.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import llm
from llm.parts import TextPart

if TYPE_CHECKING:
    from tgen.config import SamplingConfig
    from tgen.generation.sequence import Request
    from tgen.loaded_model import LoadedModel

# A schema is `llm`'s own --schema; the others are for JSON output, or not what their flag says.
_NOT_OPTIONS = {
    *("json_schema", "logprobs", "explain", "bias", "samplers", "penalize_prompt"),
    *("logit_bias", "stop_token_ids"),
}
_HELP = {  # the flags take files
    "grammar": "Generate a text that this Lark or GBNF grammar allows.",
    "words": "Generate only words of this text.",
}


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the models that tgen finds, without opening them."""
    from tgen.checkpoint.model_lookup import list_models

    for name in filter(str.isprintable, list_models()):
        register(TgenModel(name))


class TgenModel(llm.Model):
    """A model of tgen. With a chat template it answers messages, without it continues a text."""

    can_stream = True
    supports_schema = True

    def __init__(self, name: str) -> None:
        self.model_id = f"tgen/{name}"
        self._name = name

    @property
    def Options(self) -> type[llm.Options]:  # type: ignore[override]  # noqa: N802
        """The sampling options."""
        return _options_type()

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,  # noqa: ARG002  llm joins the pieces
        response: llm.Response,
        conversation: llm.Conversation | None = None,  # noqa: ARG002  the prompt has its messages
    ) -> Iterator[str]:
        """Yield the text in pieces of whole characters."""
        from tgen.config import SamplingConfig
        from tgen.config.option import flag_values, replace_flags
        from tgen.errors import TgenError

        try:
            yield from _generate(self._name, prompt, response)
        except TgenError as error:
            message = f"{error.message} ({error.hint})"
            message = replace_flags(message, flag_values(SamplingConfig), "-o {} {}".format)
            raise llm.ModelError(message) from None


def _generate(name: str, prompt: llm.Prompt, response: llm.Response) -> Iterator[str]:
    from tgen.generation.loop import make_source
    from tgen.generation.random_numbers import new_seed
    from tgen.reports.generation import TextDetails

    model = _load(name)
    options = {"seed": new_seed()} | _given(prompt.options)
    if prompt.schema is not None:
        options["json_schema"] = prompt.schema
    sampling = model.sampling(options)
    request = _request(model, prompt, sampling)
    details = TextDetails().start(sampling)
    tokens = model.complete(make_source([request]), batch_size=1)
    for token, piece in model.pieces(tokens):
        details.add(token)
        if piece:
            yield piece.decode("utf-8", "replace")
    response.set_usage(input=len(request.prompt), output=len(details.tokens))
    response.response_json = {
        key: getattr(details, key) for key in ("seed", "finish_reason", "complete")
    }
    if not details.complete:
        reasons = {"length": "raise max_new_tokens", "context": "the context is full"}
        reason = reasons.get(str(details.finish_reason), "no token can follow")
        message = f"the text is incomplete after {len(details.tokens)} tokens: {reason}"
        warnings.warn_explicit(message, UserWarning, f"tgen/{name}", 1)  # llm prints it to stderr


def _request(model: "LoadedModel", prompt: llm.Prompt, sampling: "SamplingConfig") -> "Request":
    """Return the request for the whole conversation, or without a chat template the last text."""
    from tgen.checkpoint.chat_template import chat_template_source
    from tgen.errors import UsageError

    messages = [
        {
            "role": message.role,
            "content": "".join(part.text for part in message.parts if isinstance(part, TextPart)),
        }
        for message in prompt.messages
    ]
    if chat_template_source(model.bundle.settings_path) is not None:
        return model.chat_request(messages, sampling)
    if any(message["role"] == "system" for message in messages):
        raise UsageError(
            f"{model.bundle.named_path.name} has no chat template, and so takes no system prompt",
            "remove the system prompt, or use a chat model",
        )
    text = messages[-1]["content"] if messages else ""
    return model.request(model.encode(text), sampling)


@lru_cache(maxsize=1)
def _load(name: str) -> "LoadedModel":
    from tgen.checkpoint.model_lookup import find_model
    from tgen.loaded_model import open_model

    return open_model(find_model(name).path)


def _given(options: Any) -> dict[str, Any]:
    """Return the options that were set."""
    return {name: value for name, value in dict(options).items() if value is not None}


@cache
def _options_type() -> type[llm.Options]:
    """Return SamplingConfig's options as a pydantic type, which checks them as tgen does."""
    from dataclasses import fields
    from typing import get_type_hints

    from pydantic import BeforeValidator, Field, create_model, model_validator

    from tgen.config import TEXTS, SamplingConfig
    from tgen.errors import UsageError

    class Checked(llm.Options):
        @model_validator(mode="after")
        def check(self) -> "Checked":
            try:
                SamplingConfig(**_given(self))
            except UsageError as error:
                raise ValueError(f"{error.message} ({error.hint})") from None
            return self

    types = get_type_hints(SamplingConfig) | dict.fromkeys(
        TEXTS, Annotated[list[str], BeforeValidator(_read_texts)]
    )
    declared: dict[str, Any] = {
        one.name: (
            types[one.name] | None,
            Field(default=None, description=_HELP.get(one.name, one.metadata["help"])),
        )
        for one in fields(SamplingConfig)
        if one.name not in _NOT_OPTIONS
    }
    return create_model("Options", __base__=Checked, **declared)


def _read_texts(value: Any) -> Any:
    """Return one string, or a JSON list of strings, as a list."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.startswith("[") else [value]
    except ValueError:
        return [value]
