"""Write rows and a chat template from which `tgen train` makes a small model that calls tools.

    python scripts/clients_model.py DIR

The model calls a tool if the prompt shows one, and answers after the tool's result. It learns
nothing else: its calls and texts show that the protocol works, not that the model understands.
"""

import json
import random
import sys
from pathlib import Path

TEMPLATE = """{%- set users = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set users.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {{- m.role + ': ' + (m.content or '') }}
    {%- for c in m.tool_calls or [] %}
        {{- '\\n' if m.content }}{{- '<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}
    {%- endfor %}
    {{- eos_token if m.role == 'assistant' }}{{- '\\n' }}
    {%- if tools and loop.index0 == users.last %}
        {{- '<tools>\\n' }}
        {%- for t in tools %}{{- t.function | tojson + '\\n' }}{% endfor %}
        {{- '</tools>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}
"""
N_ROWS = 600
CITIES = ["Rome", "Paris", "Oslo", "Lima", "Cairo", "Delhi", "Quito", "Turin"]
TEXT = """what is the weather in a city today and tomorrow please tell me who you are extract person
name age as json answer with one sentence given the fields produce output your input question string
object integer required type"""
WORDS = TEXT.split()


def make_row(number: int, rng: random.Random) -> dict[str, list[dict[str, object]]]:
    """Return a conversation: without tools, with a call, or with the result of a call."""

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))

    city = rng.choice(CITIES)
    question = f"{words(60)} {city} {words(20)}".strip() + rng.choice(["?", ".", "", "!"])
    if rng.random() < 0.5:
        question = rng.choice(["What is the weather in {}?", "Tell me about {}.", "{}?"]).format(
            city
        )
    properties = {
        word: {"type": rng.choice(["string", "integer"])}
        for word in rng.sample(WORDS, rng.randint(1, 4))
    }
    function: dict[str, object] = {
        "name": "_".join(rng.sample(WORDS, rng.randint(1, 2))),
        "description": words(8),
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
    if rng.random() < 0.5:
        del function["description"]
    tools = "\n".join(["\n<tools>", *[json.dumps(function)] * rng.randint(1, 2), "</tools>"])
    call = f'{{"name": "weather", "arguments": {{"city": "{city}"}}}}'
    call = f"<tool_call>\n{call}\n</tool_call>"
    text = f"It is sunny in {city}."
    messages: list[dict[str, object]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": words(40)})
    kind = number % 3
    messages.append({"role": "user", "content": question + tools * (kind > 0)})
    if kind == 2:
        result = rng.choice(["Sunny.", "sunny", words(3), text, "It is 20 degrees."])
        messages.append({"role": "assistant", "content": call, "weight": 0})
        messages.append({"role": "tool", "content": result})
    messages.append({"role": "assistant", "content": call if kind == 1 else text})
    return {"messages": messages}


def main() -> None:
    """Write rows.jsonl and template.jinja."""
    folder, rng = Path(sys.argv[1]), random.Random(1)
    rows = [json.dumps(make_row(number, rng)) for number in range(N_ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main()
