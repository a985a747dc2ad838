"""Chat templates, special tokens and messages."""

import json
from pathlib import Path
from random import Random

from fuzz.models import save_model
from fuzz.mutations import ESCAPES, Mutator, dump
from tgen.chat import render
from tgen.chat.encode import ChatFormat
from tgen.checkpoint.chat_template import read_chat_template
from tgen.config import EngineOptions
from tgen.loaded_model import open_model
from tgen.tokenizer import Tokenizer, train_char

_CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA = (
    "{% set ns = namespace(system='') %}{% for message in messages %}{% if loop.first %}"
    "{{ bos_token }}{% endif %}{% if message.role == 'system' %}"
    "{% set ns.system = message.content | trim %}{% continue %}{% endif %}"
    "{% generation %}{{ ns.system ~ message.content ~ eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('none ' ~ strftime_now('%Y')) }}{% endfor %}"
)
_PIECES = [
    *("{{ messages }}", "{{ messages[0]['content'] * 100000 }}", "{{ ('x' * 1000000) * 1000 }}"),
    *("{{ range(10**9)|list|length }}", "{{ (1,) * 10**9 }}", "{{ '%1000000000d' % 1 }}"),
    *("{{ '{:>1000000000}'.format(1) }}", "{{ messages|tojson(indent=100000000) }}"),
    *("{{ ''.__class__.__mro__ }}", "{{ messages.__init__.__globals__ }}", "{{ self }}"),
    *("{{ cycler.__init__.__globals__.os.system('id') }}", "{{ lipsum.__globals__ }}"),
    *("{{ x.y.z }}",),
    *("{% set ns.__class__ = 1 %}", "{% set ns = namespace(__init__=1) %}"),
    *("{% set messages = 1 %}",),
    *("{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends messages %}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",),
    *("{{ raise_exception('" + ESCAPES + "') }}",),
    *("{{ raise_exception(messages) }}", "{{ raise_exception('x' * 100000) }}"),
    *("{{ strftime_now('%' * 9999) }}",),
    *("{{ strftime_now(1) }}", "{{ dict(**messages[0]) }}", "{{ dict(1) }}", "{{ namespace(1) }}"),
    *("{% raw %}", "{% endif %}", "{{", "}}", "{#", "{% for %}", "{%", "\0", "\ud800"),
    *("{{ '\\ud800' }}", ESCAPES),
    *("{% break %}", "{% generation %}", "{{ '<|im_end|>' }}", "<|im_start|>"),
    *("{{ bos_token }}" * 9,),
    *("{{ messages|map(attribute='content')|join }}", "{{ messages|sort }}", "{{ 1/0 }}"),
    *("{{ 1e999|int }}",),
    *("{{ messages|batch(0)|list }}", "{{ 'x'|center(10**9) }}", "{{ 'x'|indent(10**9) }}"),
    *("{{ messages|random }}", "{{ 'a'|urlize }}", "{{ loop.index }}"),
    *("{% autoescape true %}{% endautoescape %}",),
    *("{% filter upper %}" * 50, "{% if 1 %}" * 300, "{{ " + "(" * 300 + "1" + ")" * 300 + " }}"),
    *("{{ " + "-" * 3000 + "1 }}", "{{ " + "[" * 5000 + " }}", "{{ 1" + "+1" * 5000 + " }}"),
]  # fmt: skip
_SLOW = ["{{ 9**9**9 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ 10**10**8 }}"]
_MESSAGES = [
    [{"role": "user", "content": "hi <|im_end|> é"}],
    [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ],
]


class Chat:
    """A model with a chat template; files, template and messages are changed."""

    prints = False
    starts_processes = True

    def __init__(self, folder: Path) -> None:
        render.SECONDS = 1
        tokenizer = json.loads(train_char(["é".encode()]).json)
        n = len(tokenizer["model"]["vocab"])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, name in enumerate(("<|im_start|>", "<|im_end|>", "<s>")):
            tokenizer["added_tokens"].append(
                {"id": n + i, "content": name, "special": True, **flags}
            )
        self._path = folder / "model"
        save_model(
            self._path, "llama", tokenizer=Tokenizer(json.dumps(tokenizer)), context_length=256
        )
        self._model = open_model(self._path, EngineOptions(device="cpu", threads=1))
        own = json.loads((self._path / "tokenizer_config.json").read_bytes())
        special = {"content": "<s>", "lstrip": False, "special": True}
        self._mutators = []
        for template in (_CHATML, _LLAMA):
            own = own | {"bos_token": special, "eos_token": "<|im_end|>"}
            listed = [{"name": "default", "template": template}, {"name": "tool", "template": ""}]
            self._mutators += [
                Mutator([{"tokenizer_config.json": own | {"chat_template": template}}, messages])
                for messages in _MESSAGES
            ]
            files = {
                "tokenizer_config.json": own | {"chat_template": listed},
                "special_tokens_map.json": {
                    "bos_token": special,
                    "unk_token": "<s>",
                    "mask_token": ["x"],
                },
            }
            self._mutators.append(Mutator([files, _MESSAGES[0]]))
            self._mutators.append(
                Mutator([{**files, "chat_template.jinja": template}, _MESSAGES[1]])
            )
        self._names: set[str] = set()
        self._format: ChatFormat | None = None

    def change(self, i: int, rng: Random) -> str:
        """Change the files and messages, or the text of a template."""
        mutator = self._mutators[i % len(self._mutators)]
        if i % 3 == 0:
            document, what = mutator.change(i // 3, rng)
        else:
            template, what = _change_template(rng.choice((_CHATML, _LLAMA)), rng)
            document = [
                {"chat_template.jinja": template, **mutator.document[0]},
                mutator.document[1],
            ]
        files, self._messages = (
            (*document, None, None)[:2] if isinstance(document, list) else ({}, None)
        )
        for name in self._names:
            (self._path / name).unlink(missing_ok=True)
        self._names = set()
        for name, value in files.items() if isinstance(files, dict) else ():
            if name.isidentifier() or name in (
                "tokenizer_config.json",
                "special_tokens_map.json",
                "chat_template.jinja",
            ):
                is_text = name.endswith(".jinja") and isinstance(value, str)
                content = value.encode("utf-8", "surrogatepass") if is_text else dump(value)
                (self._path / name).write_bytes(content)
                self._names.add(name)
        return what

    def read(self) -> None:
        """Encode the messages."""
        template = read_chat_template(self._path)
        sandbox = self._format and self._format._sandbox
        self._format = ChatFormat(template, self._model.tokenizer, 256)
        if sandbox:  # the process of the case before
            self._format._sandbox = sandbox
        self._format.encode(self._messages)  # type: ignore[arg-type]


def _change_template(template: str, rng: Random) -> tuple[str, str]:
    changes: list[str] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, end = sorted(rng.randrange(len(template) + 1) for _ in range(2))
        end = min(end, at + 30)
        kind = rng.randrange(4)
        piece = rng.choice(_SLOW if rng.random() < 0.003 else _PIECES)
        if kind < 2:
            boundaries = [0, *(i + 2 for i in range(len(template)) if template[i : i + 2] == "%}")]
            at = rng.choice(boundaries)
            template = template[:at] + piece + template[at:]
            changes.append(f"{piece[:40]!r} at {at}")
        elif kind == 2:
            template = template[:at] + template[end:]
            changes.append(f"removed {at} to {end}")
        else:
            template = template[:at] + template[at:end] * 2 + template[end:]
            changes.append(f"repeated {at} to {end}")
    return template, "; ".join(changes)
