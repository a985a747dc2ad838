"""Chat templates are untrusted code: what they may use, and their limits."""

import sys
from pathlib import Path
from typing import Any

import pytest

from support.chats import user
from tgen.chat import render, render_child
from tgen.chat.render_child import handle_request
from tgen.checkpoint.chat_template import ChatTemplate
from tgen.errors import ModelError, UsageError

HOSTILE = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "wide": "{{ 'a' * 10 ** 9 }}",
    "long": "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
    "padded": "{{ '%999999999d' % 1 }}",
    "list": "{{ [0] * 10 ** 9 }}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "self": "{{ self.__init__.__globals__.__builtins__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(1).x.y }}",
    "namespace": "{% set ns = namespace(__class__=1) %}{{ ns.x }}",
    "change": "{{ messages.append(1) }}",
    "syntax": "{% for %}",
    "surrogate": "{{ '\\ud800' }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "unknown": "{{ messages[0].nothing.more }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_one_error(monkeypatch, name):
    monkeypatch.setattr(render, "SECONDS", 1)
    renderer = render.Sandbox()
    with pytest.raises(ModelError, match="the chat template") as caught:
        renderer.render(ChatTemplate(HOSTILE[name], {}), [user("x")])
    assert len(caught.value.message) < 300
    assert caught.value.message.isprintable()
    assert ("took more than 1 s" in caught.value.message) == (name in ("endless", "power"))
    monkeypatch.setattr(render, "SECONDS", 5)
    assert renderer.render(ChatTemplate("{{ messages[0].content }}", {}), [user("y")]) == ["y"]


def test_memory_and_output_are_limited(monkeypatch):
    request: dict[str, Any] = {"source": "{{ 'ab' * 60 }}", "variables": {}}
    request |= {"conversations": [user("x")], "prompts": [True], "tools": [None], "now": None}
    assert handle_request(request) == {"texts": ["ab" * 60]}
    monkeypatch.setattr(render_child, "_MAX_CHARACTERS", 100)
    assert handle_request(request) == {"failed": "its output is too large", "at": 0}
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux reports the peak memory of a process")
    renderer = render.Sandbox()
    with pytest.raises(ModelError, match="its output is too large"):
        renderer.render(ChatTemplate(HOSTILE["wide"], {}), [user("x")])
    peak = Path(f"/proc/{renderer._child.process.pid}/status").read_text().split("VmPeak:")[1]
    assert int(peak.split()[0]) * 1024 <= render.BYTES


def test_one_process_handles_many_requests(monkeypatch):
    renderer = render.Sandbox()
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    assert renderer.render(template, [user("a"), user("b")]) == ["<s>a", "<s>b"]
    child = renderer._child.process
    assert renderer.render(template, [user("c")]) == ["<s>c"]
    assert renderer._child.process is child
    child.kill()
    child.wait()
    assert renderer.render(template, [user("d")]) == ["<s>d"]
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match="crashed its process"):
        render.Sandbox().render(template, [user("e")])


def test_functions_of_transformers_are_available():
    def render_source(source):
        return render.Sandbox().render(ChatTemplate(source, {}), [user('é"<')])[0]

    assert render_source("{{ messages | tojson }}") == '[{"role": "user", "content": "é\\"<"}]'
    assert render_source("{{ dict(a=1) | tojson(indent=1) }}") == '{\n "a": 1\n}'
    assert render_source("{{ strftime_now('%Y') }}").isdecimal()
    assert (
        render_source(
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        )
        == "01"
    )
    assert (
        render_source("{{ tools is none }}{{ add_generation_prompt }}{{ nothing }}") == "TrueTrue"
    )
    with pytest.raises(UsageError, match="rejects the messages: no 'user'") as caught:
        render_source(
            "{{ raise_exception('no ' + messages[0].role | tojson | replace('\"', \"'\")) }}"
        )
    assert "--system" in caught.value.hint
