"""Fields about tools: functions, choices and earlier calls."""

import json
from typing import Any

import pytest

from support.tools import NAMED, USER, WEATHER, request_of
from tgen.loaded_model import LoadedModel
from tgen.serve.http_error import HttpError
from tgen.serve.preparation import find_call_form, prepare


def test_choice_of_no_tool_is_a_chat_without_tools(loaded: LoadedModel) -> None:
    without = request_of(tools=[], max_tokens=5, seed=1)
    request = request_of(tool_choice="none", max_tokens=5, seed=1)
    assert prepare(loaded, request, 9) == prepare(loaded, without, 9)


def test_choice_of_a_function_needs_no_type() -> None:  # huggingface_hub sends none
    choice = request_of(tool_choice={"function": {"name": "weather"}}).tool_choice
    assert choice == request_of(tool_choice=NAMED).tool_choice


def test_arguments_of_earlier_calls_are_objects_if_they_are_json() -> None:
    def shown(arguments: Any) -> Any:
        call = {"id": "a", "function": {"name": "weather", "arguments": arguments}}
        message = {"role": "assistant", "tool_calls": [call]}
        plain = request_of(messages=[*USER, message, *USER]).conversation[1]
        return plain["tool_calls"][0]["function"]["arguments"]

    assert shown('{"city": "Rome"}') == shown({"city": "Rome"}) == {"city": "Rome"}
    assert shown('{"city": "Ro') == '{"city": "Ro'
    assert shown("") == shown(None) == shown("{}") == {}


@pytest.mark.parametrize(
    "parameters", [{"type": "array"}, {"description": "x" * (1 << 16)}, {"title": "\ud800"}]
)
def test_parameters_are_the_schema_of_an_object(parameters: dict[str, Any]) -> None:
    tool = json.loads(json.dumps(WEATHER))
    tool["function"]["parameters"] |= parameters
    with pytest.raises(HttpError, match=r"^tools\[0\]\.function\.parameters: ") as error:
        request_of(tools=[tool])
    assert error.value.param == "tools[0].function.parameters"


def test_arguments_that_are_only_required_are_possible(loaded: LoadedModel) -> None:
    parameters = {"type": "object", "properties": {}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    request = request_of(tools=[tool], tool_choice="required", max_tokens=50)
    calls = find_call_form(loaded, request)
    assert prepare(loaded, request, 50, calls=calls).requests


def test_null_keywords_are_as_if_not_given() -> None:
    def schema_of(**parameters: Any) -> dict[str, Any]:
        function = {"name": "now", "parameters": {"type": "object"} | parameters}
        request = request_of(tools=[{"type": "function", "function": function}])
        return request.tools[0].arguments_schema

    given = {"properties": {"city": {"type": "string"}}}
    assert schema_of(**given, required=None) == schema_of(**given)
    assert schema_of(properties=None, required=None) == schema_of(properties={})
