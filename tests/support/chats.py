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
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "zephyr": ZEPHYR}
SYSTEM = {"role": "system", "content": " You are  the king.\n"}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def plain_model(tokenizer, tmp_path_factory):
    """Return a random model with control tokens and without a chat template."""
    backend = Backend.from_str(tokenizer.json)
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.add_special_tokens([AddedToken("<|user|>", special=True, rstrip=True)])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("</think>", "<other>")])
    extended = Tokenizer(backend.to_str())
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
