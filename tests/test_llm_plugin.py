"""The plugin, in the real `llm`: texts are those of tgen, and nothing is imported before."""

# ruff: noqa: F401, F811  # fixtures are imported

import json
import subprocess
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from support.adapters import save_adapter
from support.chats import CHATML, SYSTEM, model, plain_model, user
from support.command import clean_environment
from tgen.config import SamplingConfig
from tgen.python_api import load

OPTIONS = {"seed": 3, "temperature": 0.9, "max_new_tokens": 12}
_CHILD = """
import sys
from llm.plugins import load_plugins, pm
load_plugins()
from tgen import llm_plugin
if not pm.is_registered(llm_plugin):
    pm.register(llm_plugin, name="tgen")
from llm.cli import cli
cli(sys.argv[1:], standalone_mode=False)
print("imported:", *sorted(name for name in sys.modules if not name.startswith("llm")))
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return the folder of `llm`'s log, which takes a second to create."""
    return tmp_path_factory.mktemp("llm")


@pytest.fixture(scope="module")
def plugin():
    """Return the plugin; `llm` takes seconds to import, so only the worker of these tests does."""
    pytest.importorskip("llm", reason="llm is not installed")
    return import_module("tgen.llm_plugin")


@pytest.fixture
def run(plugin, trained, logs, tmp_path, monkeypatch):
    """Run `llm` in a directory with ./models/mine; return its status and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_USER_PATH", str(logs))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(trained)
    from llm.cli import cli
    from llm.plugins import load_plugins, pm

    load_plugins()
    if not pm.is_registered(plugin):  # the entry point is there if installed
        pm.register(plugin, name="tgen")
    plugin._load.cache_clear()

    def run_llm(*arguments, **options):
        flags = [word for name, value in options.items() for word in ("-o", name, str(value))]
        result = CliRunner().invoke(cli, [*map(str, arguments), *flags])
        return result.exit_code, result.output

    return run_llm


def test_models_are_listed_by_name(run):
    status, out = run("models")
    assert status == 0
    assert "TgenModel: tgen/mine\n" in out
    assert "TgenModel: tgen/shakespeare\n" in out


@pytest.mark.parametrize("streaming", [[], ["--no-stream"]])
def test_text_is_what_tgen_generates(run, trained, streaming):
    status, out = run("-m", "tgen/mine", "What is", *streaming, **OPTIONS)
    assert status == 0
    assert out == load(trained).generate("What is", **OPTIONS) + "\n"


@pytest.mark.usefixtures("run")
def test_pieces_are_streamed():
    response = import_module("llm").get_model("tgen/mine").prompt("What is", **OPTIONS)
    assert len(list(response)) > 1


def test_usage_and_seed_are_logged(run, trained):
    run("-m", "tgen/mine", "What is", max_new_tokens=4)
    (entry,) = json.loads(run("logs", "--json", "-n", 1)[1])
    assert entry["input_tokens"] == len(load(trained).encode("What is"))
    assert entry["output_tokens"] == 4
    seed = entry["response_json"]["seed"]
    again = load(trained).generate("What is", seed=seed, max_new_tokens=4)
    assert entry["response"] == again
    assert entry["response_json"]["finish_reason"] == "length"


def test_options_are_those_of_sampling_config(run, plugin):
    shown = run("models", "list", "--options", "-m", "tgen/mine")[1]
    left_out = plugin._NOT_OPTIONS
    for name in SamplingConfig.__dataclass_fields__:
        assert (f"\n    {name}: " in shown) == (name not in left_out)
    assert "FILE" not in shown


def test_a_grammar_is_a_text(run):
    grammar = {"grammar": 'start: "king" | "queen"', "max_new_tokens": 20}
    status, out = run("-m", "tgen/mine", "The ", **grammar)
    assert (status, out.strip() in ("king", "queen")) == (0, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tempature": 1}, "tempature"),
        ({"temperature": -1}, "temperature: invalid value -1.0 (set temperature to a"),
        ({"top_k": 1.5}, "top_k"),
        ({"regex": "a", "require": "b"}, "require cannot be combined with regex"),
        ({"regex": "(", "max_new_tokens": 3}, "regex: unclosed group"),
    ],
)
def test_invalid_options_are_one_line(run, options, words):
    status, out = run("-m", "tgen/mine", "a", **options)
    assert status == 1
    assert words in out
    assert "Traceback" not in out


@pytest.mark.parametrize("choices", ["king", '["king", "a, b"]'])
def test_strings_are_one_or_a_json_list(run, choices):
    status, out = run("-m", "tgen/mine", "The ", choices=choices, max_new_tokens=20)
    assert status == 0
    assert out.strip() in ("king", "a, b")


def test_a_schema_constrains_the_text(run):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    status, out = run("-m", "tgen/mine", "a", "--schema", json.dumps(schema), max_new_tokens=60)
    assert status == 0
    assert {type(item) for item in json.loads(out)} == {bool}


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [({"regex": "a{50}"}, "after 5 tokens: raise max_new_tokens"), ({"regex": "ab?"}, "")],
)
def test_a_cut_text_is_warned_about(run, constraint, reason):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        assert run("-m", "tgen/mine", "a", max_new_tokens=5, **constraint)[0] == 0
    told = [str(one.message) for one in caught if one.filename == "tgen/mine"]
    assert told == ([f"the text is incomplete {reason}"] if reason else [])


def test_errors_name_options_of_llm(run):
    status, out = run("-m", "tgen/mine", "a", max_new_tokens=99, overflow="error")
    assert status == 1
    assert "(use -o max_new_tokens 32 or less, or add -o overflow slide)" in out


def test_a_chat_model_answers_the_whole_conversation(run, model):
    path = model(CHATML)
    Path("models/chat").symlink_to(path)
    greedy = {"temperature": 0, "max_new_tokens": 5}
    chat = load(path)
    messages = [SYSTEM | {"content": SYSTEM["content"].strip()}, *user("What is a crown?")]
    first = chat.chat(messages, **greedy)
    out = run("-m", "tgen/chat", "-s", SYSTEM["content"], "What is a crown?", **greedy)[1]
    assert out == first + "\n"
    messages += [{"role": "assistant", "content": first}, *user("And a king?")]
    assert run("-c", "And a king?", **greedy)[1] == chat.chat(messages, **greedy) + "\n"


def test_an_adapter_answers_with_its_own_template(run, plain_model):
    save_adapter(Path("models/kb"), plain_model, template=CHATML)
    greedy = {"temperature": 0, "max_new_tokens": 5}
    answer = load("models/kb").chat(user("What is a crown?"), **greedy)
    assert run("-m", "tgen/kb", "What is a crown?", **greedy) == (0, answer + "\n")
    assert run("-m", "tgen/kb", "-s", "Be brief.", "What is a crown?", **greedy)[0] == 0


def test_a_model_without_a_template_continues_the_last_text(run, trained):
    run("-m", "tgen/mine", "What is", **OPTIONS)
    assert (
        run("-c", "The king", **OPTIONS)[1] == load(trained).generate("The king", **OPTIONS) + "\n"
    )
    status, out = run("-m", "tgen/mine", "-s", "Be brief.", "What is")
    assert status == 1
    assert "mine has no chat template" in out


@pytest.mark.usefixtures("run")
def test_listing_models_imports_neither_torch_nor_the_configuration():
    def imported(*arguments):
        result = subprocess.run(
            [sys.executable, "-c", _CHILD, *arguments],
            capture_output=True,
            check=True,
            env=clean_environment(),
        )
        return set(result.stdout.decode().rpartition("imported: ")[2].split())

    assert not imported("models") & {"torch", "llvmlite", "tgen.config", "tgen.python_api"}
    assert {name for name in imported("--version") if name.startswith("tgen")} == {
        "tgen",
        "tgen.llm_plugin",
        "tgen.version",
    }


def test_the_entry_point_is_the_plugin(plugin):
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    (target,) = project["project"]["entry-points"]["llm"].values()
    assert import_module(target) is plugin
