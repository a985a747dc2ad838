"""The fields of a request that say how its texts are sampled, and what constrains them."""

import json
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from tgen.serve.json_body import JsonObject, check_unicode

_MAX_STOPS, _MAX_STOP_BYTES = 4, 256
_MAX_SCHEMA_BYTES = 1 << 16  # compiled grammars and their schemas are cached
_TINY = 5e-324  # the lowest top_p: only the most likely token is left
_SAMPLING = (  # fields that SamplingConfig has, too
    *("temperature", "top_p", "top_k", "min_p", "stop"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


def _check_stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    is_list = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not is_list or not all(
        isinstance(stop, str) and 1 <= len(check_unicode(stop).encode()) <= _MAX_STOP_BYTES
        for stop in stops
    ):
        raise ValueError(f"up to {_MAX_STOPS} strings of 1 to {_MAX_STOP_BYTES} bytes")
    return list(stops)


def _check_size(schema: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(schema)) > _MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema of up to {_MAX_SCHEMA_BYTES:,} bytes")
    return schema


_Fraction = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Schema = Annotated[dict[str, Any], AfterValidator(_check_size)]


class _JsonSchema(JsonObject, extra="forbid"):
    definition: _Schema = Field(alias="schema")
    name: Any = None
    description: Any = None
    strict: Any = None  # every text satisfies the schema


class _ResponseFormat(JsonObject, extra="forbid"):
    type: str = ""
    json_schema: _JsonSchema | None = None
    # for json_object, as in llama.cpp
    definition: Annotated[_Schema | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        lacks_schema = self.type == "json_schema" and not self.json_schema
        if lacks_schema or self.type not in ("text", "json_object", "json_schema"):
            raise ValueError("the type text, json_object, or json_schema with a schema")
        if self.json_schema and self.type != "json_schema":
            raise ValueError(f"no json_schema beside the type {self.type}")
        if self.definition is not None and self.type != "json_object":
            raise ValueError(f"no schema beside the type {self.type}")
        return self

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """The JSON schema that the text must satisfy; None for any text."""
        if self.type == "json_schema" and self.json_schema:
            return self.json_schema.definition
        if self.type != "json_object":
            return None
        return {"type": "object"} if self.definition is None else self.definition


class SamplingFields(JsonObject):
    """The fields of all endpoints that choose tokens."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1
    top_p: _Fraction = 1
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = 0
    min_p: _Fraction = 0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    frequency_penalty: _Penalty = 0
    presence_penalty: _Penalty = 0
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] = 1
    stop: Annotated[list[str], PlainValidator(_check_stops)] | None = None
    response_format: _ResponseFormat = _ResponseFormat(type="text")

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingConfig that the request sets, besides seed, limit and logprobs."""
        given = [name for name in _SAMPLING if name in self.model_fields_set]
        sampling = {name: getattr(self, name) for name in given}
        if "top_p" in sampling:
            sampling["top_p"] = max(self.top_p, _TINY)
        if "top_k" in sampling:
            sampling["top_k"] = max(self.top_k, 0)  # vLLM's -1 disables it, too
        if (schema := self.response_format.schema_of_text) is not None:
            sampling["json_schema"] = schema
        return sampling
