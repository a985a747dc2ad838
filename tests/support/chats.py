"""Chat models: control tokens, and chat templates of known models."""

import json
import os

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from support.models import make_model
from tgen.checkpoint import model_dir
from tgen.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", "[INST]", "[/INST]", "<|tool|>"]

CHATML = """{%- for m in messages %}
    {{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA = """{% for message in messages %}
{% set start = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{% set text = start + message['content'] | trim + '<|eot_id|>' %}
{% if loop.first %}{% set text = bos_token + text %}{% endif %}
{{ text }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL = """{%- set ns = namespace(system='') -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {%- set ns.system = message.content + '\\n\\n' -%}
    {%- continue -%}
  {%- endif -%}
  {%- if message.role == 'user' -%}
    {{- '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' -}}{%- set ns.system = '' -%}
  {%- elif message.role == 'assistant' -%}
    {% generation %}{{- ' ' ~ message.content ~ eos_token -}}{% endgeneration %}
  {%- else -%}
    {{ raise_exception('the role ' ~ message.role ~ ' is not supported') }}
  {%- endif -%}
{%- endfor -%}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% else %}
{{ '<|assistant|>\\n' + message['content'].split('</think>')[-1] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
# Templates with tools, in the syntax of Qwen, Mistral and Llama; the control token is Mistral's.
TOOLS_START = """{%- if tools %}{{- '<|im_start|>system\\nTools:\\n' }}
{%- for t in tools %}{{- t.function | tojson + '\\n' }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content }}"""
TOOLS_END = """{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
HERMES_TOOLS = f"""{TOOLS_START}
    {{%- for c in m.tool_calls or [] %}}
        {{{{- '\\n<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}}}
    {{%- endfor %}}
{TOOLS_END}"""
MISTRAL_TOOLS = f"""{TOOLS_START}
    {{%- if m.tool_calls %}}
        {{{{- '<|tool|> [' }}}}
        {{%- for c in m.tool_calls %}}
            {{%- if c.id | length != 9 %}}{{{{ raise_exception('an id is short') }}}}{{% endif %}}
            {{{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}}' }}}}
            {{{{- ']' if loop.last else ', ' }}}}
        {{%- endfor %}}
    {{%- endif %}}
{TOOLS_END}"""
LLAMA_TOOLS = f"""{TOOLS_START}
    {{%- if m.tool_calls %}}
        {{%- if m.tool_calls | length > 1 %}}{{{{ raise_exception('one call') }}}}{{% endif %}}
        {{%- set c = m.tool_calls[0].function %}}
        {{{{- '{{"name": "' + c.name + '", "parameters": ' + c.arguments | tojson + '}}' }}}}
    {{%- endif %}}
{TOOLS_END}"""
GRANITE_TOOLS = f"""{{#- respond with <|tool_call|> followed by a JSON list of tools used #}}
{TOOLS_START}{TOOLS_END}"""
SMOLLM_TOOLS = f"""{{#- return <tool_call>\\n{{\\"name\\": <function-name>, ... #}}
{TOOLS_START}{TOOLS_END}""".replace("if tools", "if xml_tools").replace("in tools", "in xml_tools")
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "zephyr": ZEPHYR}
SYSTEM = {"role": "system", "content": " You are  the king.\n"}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def plain_model(tokenizer, tmp_path_factory):
    """Return a random model with control tokens and without a chat template."""
    extended = extend_tokenizer(tokenizer)
    model = make_model("llama", vocab_size=extended.vocab_size, context_length=256)
    path = tmp_path_factory.mktemp("chat") / "model"
    model_dir.save(path, model.config, extended, model.to_arrays())
    return path


@pytest.fixture
def model(plain_model, tmp_path):
    """Return a function that adds a chat template to the model and returns its path."""

    def add_template(source, **config):
        for file in plain_model.iterdir():
            if not (tmp_path / file.name).exists():
                os.link(file, tmp_path / file.name)
        tokenizer_config = json.loads((plain_model / "tokenizer_config.json").read_bytes())
        tokenizer_config |= {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": source,
        } | config
        (tmp_path / "tokenizer_config.json").unlink()
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        return tmp_path

    return add_template


# Templates for training: each has the feature of a known model.
_TURN = "'<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n'"
_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
OWN_SYSTEM = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}{% endif %}"
    f"{{%- for m in messages %}}{{{{- {_TURN} }}}}{{% endfor %}}{_PROMPT}"
)
DATED = (
    "{{- '<|im_start|>system\\nIt is ' + strftime_now('%d %B %Y') + '.<|im_end|>\\n' }}"
    f"{{%- for m in messages %}}{{{{- {_TURN} }}}}{{% endfor %}}{_PROMPT}"
)
GEMMA = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{% endif %}"
    "{{- '<|im_start|>' + ('model' if m.role == 'assistant' else 'user') + '\\n' }}"
    "{{- m.content | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{% endif %}"
)
QWEN3 = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}"
    "{%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{- m.content.split('</think>')[-1] }}{% else %}{{- m.content }}{% endif %}"
    f"{{{{- '<|im_end|>\\n' }}}}{{% endfor %}}{_PROMPT}"
)
PHI3 = (
    f"{{%- for m in messages %}}{{{{- {_TURN} }}}}{{% endfor %}}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{% else %}{{- eos_token }}{% endif %}"
)
NO_END = (
    "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant:' }}{% endif %}"
)


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def extend_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Add control tokens."""
    backend = Backend.from_str(tokenizer.json)
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.add_special_tokens([AddedToken("<|user|>", special=True, rstrip=True)])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("</think>", "<other>")])
    return Tokenizer(backend.to_str())
