"""The plain chat template, for models that have none: questions and answers as lines of text.

    Q: Who are you?
    A: The king.<|endoftext|>

It needs no tokens that the model does not have. A user who writes a line that begins with `A:` can
therefore imitate an answer.
"""

import json

PLAIN = "plain"  # its name as an option
_SOURCE = """\
{{- BEGIN -}}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- message['content'] | trim + '\\n' -}}
{%- elif message['role'] == 'user' -%}
{{- 'Q: ' + message['content'] | trim + '\\n' -}}
{%- elif message['role'] == 'assistant' -%}
{{- 'A: ' + message['content'] | trim + END + '\\n' -}}
{%- else -%}
{{- raise_exception('the role ' + message['role'] + ' is not supported') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'A:' -}}{%- endif -%}
"""


def plain_template(begin: str, end: str) -> str:
    """Return the template's Jinja source; `begin` starts a conversation and `end` ends an answer,
    both names of control tokens."""
    return _SOURCE.replace("BEGIN", json.dumps(begin)).replace("END", json.dumps(end))
