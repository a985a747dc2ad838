"""Stop strings that no text of the model can have."""

# ruff: noqa: F401, F811  # fixtures are imported

import json

from support.chats import CHATML, model, plain_model
from tgen.api import load
from tgen.cli.app import run


def test_name_of_a_control_token_stops_at_the_token(model, capsysbinary):
    path = model(CHATML)
    loaded = load(path)
    end = loaded.tokenizer.added_tokens["<|eot_id|>"]
    assert end not in loaded._loaded.bundle.end_ids
    sampling = loaded._loaded.sampling({"stop": ["a", "<|eot_id|>", b"<|tool|>"]})
    ends = loaded._loaded.request(loaded.encode("x"), sampling).ends
    assert ends == {end, loaded.tokenizer.added_tokens["<|tool|>"]}
    base = ["generate", "-m", str(path), "-p", "Who?", "-n", "400", "-t", "9", "--top-k", "0"]
    base += ["--json", "-q", "--seed", "1"]
    assert run(base) == 0
    free = json.loads(capsysbinary.readouterr().out)
    assert run([*base, "--stop", "<|eot_id|>"]) == 0
    stopped = json.loads(capsysbinary.readouterr().out)
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["text"]) < len(free["text"])


def test_literal_escapes_are_a_warning(model, capsysbinary):
    base = ["generate", "-m", str(model(CHATML)), "-p", "Who?", "-n", "1"]
    assert run([*base, "--stop", r"a\nb", "--ban", r"\t", "--require", "a"]) in (0, 1, 2)
    err = capsysbinary.readouterr().err.decode()
    assert r"warning: --stop 'a\\nb': \n is a backslash and a letter; in bash, write" in err
    assert "warning: --ban" in err
    assert run([*base, "--stop", "\n", "--ban", "\\", "--stop", r"\x"]) == 0
    assert "backslash" not in capsysbinary.readouterr().err.decode()
