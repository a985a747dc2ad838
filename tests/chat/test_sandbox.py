"""Templates are programs from elsewhere: what they may use, and that none gets out of hand."""

import sys
from pathlib import Path

import pytest

from support.chats import user
from tgen.chat import render, sandbox
from tgen.chat.render import answer
from tgen.chat.template import ChatTemplate
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
def test_a_hostile_template_is_one_error(monkeypatch, name):
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    renderer = sandbox.Sandbox()
    with pytest.raises(ModelError, match="the chat template") as caught:
        renderer.render(ChatTemplate(HOSTILE[name], {}), [user("x")])
    assert len(caught.value.message) < 300
    assert caught.value.message.isprintable()
    monkeypatch.setattr(sandbox, "SECONDS", 5)
    assert renderer.render(ChatTemplate("{{ messages[0].content }}", {}), [user("y")]) == ["y"]


def test_memory_and_length_are_bounded(monkeypatch):
    asked = {"source": "{{ 'ab' * 60 }}", "variables": {}, "conversations": [user("x")]}
    assert answer(asked) == {"texts": ["ab" * 60]}
    monkeypatch.setattr(render, "_LONGEST", 100)
    assert answer(asked) == {"failed": "it makes too much of them"}
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells how much a process has used")
    renderer = sandbox.Sandbox()
    with pytest.raises(ModelError, match="it makes too much"):
        renderer.render(ChatTemplate(HOSTILE["wide"], {}), [user("x")])
    told = Path(f"/proc/{renderer._child.pid}/status").read_text().split("VmPeak:")[1]
    assert int(told.split()[0]) * 1024 <= sandbox.BYTES


def test_a_process_serves_many(monkeypatch):
    renderer = sandbox.Sandbox()
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    assert renderer.render(template, [user("a"), user("b")]) == ["<s>a", "<s>b"]
    child = renderer._child
    assert renderer.render(template, [user("c")]) == ["<s>c"]
    assert renderer._child is child
    child.kill()
    child.wait()
    assert renderer.render(template, [user("d")]) == ["<s>d"]
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match="ended the process that runs it"):
        sandbox.Sandbox().render(template, [user("e")])


def test_the_names_that_templates_are_written_for():
    def made(source):
        return sandbox.Sandbox().render(ChatTemplate(source, {}), [user('é"<')])[0]

    assert made("{{ messages | tojson }}") == '[{"role": "user", "content": "é\\"<"}]'
    assert made("{{ dict(a=1) | tojson(indent=1) }}") == '{\n "a": 1\n}'
    assert made("{{ strftime_now('%Y') }}").isdecimal()
    assert (
        made("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert made("{{ tools is none }}{{ add_generation_prompt }}{{ nothing }}") == "TrueTrue"
    with pytest.raises(UsageError, match="refuses the messages: no 'user'") as caught:
        made("{{ raise_exception('no ' + messages[0].role | tojson | replace('\"', \"'\")) }}")
    assert "--system" in caught.value.hint
