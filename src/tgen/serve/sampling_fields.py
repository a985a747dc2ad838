"""The fields of a request that say how its texts are sampled, and what constrains them."""

from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    PlainValidator,
    model_validator,
)

from tgen.config import CONSTRAINTS, SamplingConfig
from tgen.serve.http_error import bad_request
from tgen.serve.json_body import (
    JsonObject,
    JsonSchema,
    Whole,
    check_size,
    check_unicode,
    to_whole,
)

_ALIASES = {  # names of llama.cpp and vLLM -> tgen's
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_window",
    "dry_sequence_breakers": "dry_breakers",
    "bad_words": "ban",
}
_MAX_STRINGS, _MAX_STRING_BYTES = 64, 256  # of an option; they are searched for at every token
_SCHEMA = AliasChoices("schema", "value")
_TINY = 5e-324  # the lowest top_p: only the most likely token is left


def rename_aliases(given: dict[str, Any]) -> dict[str, str]:
    """Give fields with names of other servers tgen's names, in place; return the other names.

    Raises HttpError for a field that is given by both names.
    """
    aliases = {_ALIASES[alias]: alias for alias in _ALIASES.keys() & given.keys()}
    for name, alias in aliases.items():
        if name in given:
            raise bad_request(f"{alias} cannot be combined with {name}", alias)
        given[name] = given.pop(alias)
        if alias == "repeat_last_n" and given[name] == 0:  # none there, all tokens here
            message = "repeat_last_n: invalid value 0, expected -1 or at least 1"
            raise bad_request(message, alias)
    return aliases


def _check_strings(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    is_list = isinstance(strings, list) and len(strings) <= _MAX_STRINGS
    if not is_list or not all(
        isinstance(one, str) and 1 <= len(check_unicode(one).encode()) <= _MAX_STRING_BYTES
        for one in strings
    ):
        raise ValueError(f"up to {_MAX_STRINGS} strings of 1 to {_MAX_STRING_BYTES} bytes")
    return list(strings)


def _check_biases(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError('a number per string, such as {"king": 2}')
    _check_strings([*value])
    return value


def _check_schema(value: Any) -> Any:
    """Return a JSON schema, which may be its text."""
    if not isinstance(value, (dict, str, bool)):
        raise ValueError("a JSON schema")
    return check_size(value)


def _check_texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError("a list of strings")
    return list(check_size(value))


_Fraction = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_AnyCount = Annotated[Any, BeforeValidator(to_whole)]
_Strings = Annotated[list[str], PlainValidator(_check_strings)]
_AnySchema = Annotated[Any, PlainValidator(_check_schema)]
_Grammar = Annotated[str, AfterValidator(check_size)]
_Texts = Annotated[list[str], PlainValidator(_check_texts)]


class _JsonSchema(JsonObject, extra="forbid"):
    definition: JsonSchema = Field(alias="schema")
    name: Any = None
    description: Any = None
    strict: Any = None  # every text satisfies the schema


class _ResponseFormat(JsonObject, extra="forbid"):
    type: str = ""
    json_schema: _JsonSchema | None = None
    # in place of json_schema, as in llama.cpp or, by the name value, in text-generation-inference
    definition: Annotated[JsonSchema | None, Field(validation_alias=_SCHEMA)] = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        given = self.json_schema or self.definition
        lacks_schema = self.type == "json_schema" and given is None
        if lacks_schema or self.type not in ("text", "json_object", "json_schema"):
            raise ValueError("the type text, json_object, or json_schema with a schema")
        if self.json_schema and self.type != "json_schema":
            raise ValueError(f"no json_schema beside the type {self.type}")
        if self.definition is not None and (self.type == "text" or self.json_schema):
            raise ValueError(f"no schema beside the type {self.type}")
        return self

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """The JSON schema that the text must satisfy; None for any text."""
        if self.json_schema:
            return self.json_schema.definition
        if self.type == "text":
            return None
        return {"type": "object"} if self.definition is None else self.definition


class _StructuredOutputs(JsonObject, extra="forbid"):
    """vLLM's object with one constraint."""

    definition: Annotated[_AnySchema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: _Grammar | None = None
    choice: _Texts | None = None
    grammar: _Grammar | None = None


class SamplingFields(JsonObject):
    """The fields of all endpoints that choose tokens. SamplingConfig checks those of any type."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1
    top_p: _Fraction = 1
    top_k: Annotated[Whole, Field(ge=-1, le=2**31 - 1)] = 0
    min_p: _Fraction = 0
    typical_p: Any = 1
    top_n_sigma: Any = 0
    xtc_probability: Any = 0
    xtc_threshold: Any = 0.1
    samplers: Any = ()
    seed: Annotated[Whole, Field(ge=-1, le=2**63 - 1)] = -1  # a random one
    frequency_penalty: _Penalty = 0
    presence_penalty: _Penalty = 0
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] = 1
    penalty_window: _AnyCount = 0
    no_repeat_ngram: _AnyCount = 0
    dry_multiplier: Any = 0
    dry_base: Any = 1.75
    dry_allowed_length: _AnyCount = 2
    dry_breakers: _Strings | None = None
    logit_bias: Any = ()
    bias: Annotated[dict[str, Any], PlainValidator(_check_biases)] | None = None
    ban: _Strings | None = None
    require: _Strings | None = None
    stop: _Strings | None = None
    stop_token_ids: Any = ()
    until_newline: Any = False
    min_tokens: _AnyCount = 0
    ignore_eos: Any = False
    response_format: _ResponseFormat = _ResponseFormat(type="text")
    structured_outputs: _StructuredOutputs = _StructuredOutputs()
    guided_json: _AnySchema | None = None  # the older names of vLLM
    guided_regex: _Grammar | None = None
    guided_choice: _Texts | None = None
    guided_grammar: _Grammar | None = None
    json_schema: _AnySchema | None = None
    regex: _Grammar | None = None
    choices: _Texts | None = None
    grammar: _Grammar | None = None
    words: _Grammar | None = None  # a text, never a path

    @model_validator(mode="after")
    def _check_constraints(self) -> Self:
        fields = [field for field, _, _ in self._constraints]
        if len(fields) > 1:
            first, second = fields[:2]
            raise bad_request(f"{second}: there is a constraint already (got {first})", second)
        name = "structured_outputs"
        if name in self.model_fields_set and name not in fields:  # an error in vLLM, too
            message = f"{name}: no constraint, expected json, json_object, regex, choice or grammar"
            raise bad_request(message, name)
        return self

    @property
    def _constraints(self) -> list[tuple[str, str, Any]]:
        """The given constraints: the request's field, SamplingConfig's option, and its value.

        A client may send the same one by vLLM's new and old names; then the first counts.
        """
        form, structured = self.response_format, self.structured_outputs
        any_object = {"type": "object"} if structured.json_object else None
        possible = [
            ("response_format", "json_schema", form.schema_of_text),
            ("structured_outputs", "json_schema", structured.definition),
            ("structured_outputs", "json_schema", any_object),
            ("structured_outputs", "regex", structured.regex),
            ("structured_outputs", "choices", structured.choice),
            ("structured_outputs", "grammar", structured.grammar),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choices", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            *((name, name, getattr(self, name)) for name in CONSTRAINTS),
        ]
        given = [one for one in possible if one[2] not in (None, "")]
        options = [one[1:] for one in given]
        return [one for i, one in enumerate(given) if one[1:] not in options[:i]]

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingConfig that the request sets, besides seed, limit and logprobs."""
        names = SamplingConfig.__dataclass_fields__.keys() - {"seed", "logprobs", *CONSTRAINTS}
        sampling = {name: getattr(self, name) for name in self.model_fields_set & names}
        if "top_p" in sampling:
            sampling["top_p"] = max(self.top_p, _TINY)
        for name in ("top_k", "top_n_sigma", "penalty_window"):
            if sampling.get(name) == -1:  # in vLLM and llama.cpp what 0 is here
                sampling[name] = 0
        return sampling | {option: value for _, option, value in self._constraints}

    @property
    def constraint(self) -> str | None:
        """The request's field that constrains the text, if any."""
        return self._constraints[0][0] if self._constraints else None

    @property
    def names(self) -> dict[str, str]:
        """The request's fields that have other names than the options that they set."""
        return {option: field for field, option, _ in self._constraints}
