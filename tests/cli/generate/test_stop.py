"""Stop strings that no text of the model can have."""

# ruff: noqa: F401, F811  # fixtures are imported

from support.chats import CHATML, model, plain_model
from tgen.cli.app import run
from tgen.python_api import load


def test_name_of_a_control_token_stops_at_the_token(model):
    path = model(CHATML)
    loaded = load(path)
    end = loaded.tokenizer.added_tokens["<|eot_id|>"]
    assert end not in loaded._loaded.bundle.end_ids
    sampling = loaded._loaded.sampling({"stop": ["a", "<|eot_id|>", b"<|tool|>"]})
    ends = loaded._loaded.request(loaded.encode("x"), sampling).ends
    assert ends == {end, loaded.tokenizer.added_tokens["<|tool|>"]}

    def ids(seed, **options):
        sampling = loaded._loaded.sampling({"temperature": 9, "top_k": 0, "seed": seed, **options})
        tokens = loaded._loaded.tokens([loaded.encode("Who?")], sampling=sampling)
        return [(token.id, token.finish) for token in tokens]

    found = 0
    for seed in range(9):
        free = ids(seed, max_new_tokens=200)
        at = next((i for i, (token, _) in enumerate(free) if token == end), None)
        if at is not None:
            found += 1
            stopped = ids(seed, max_new_tokens=200, stop="<|eot_id|>")
            assert stopped == [*free[:at], (end, "stop")]
    assert found


def test_literal_escapes_are_a_warning(model, capsysbinary):
    base = ["generate", "-m", str(model(CHATML)), "-p", "Who?", "-n", "1"]
    assert run([*base, "--stop", r"a\nb", "--ban", r"\t", "--require", "a"]) in (0, 1, 2)
    err = capsysbinary.readouterr().err.decode()
    assert r"warning: --stop 'a\\nb': \n is a backslash and a letter; in bash, write" in err
    assert "warning: --ban" in err
    assert run([*base, "--stop", "\n", "--ban", "\\", "--stop", r"\x"]) == 0
    assert "backslash" not in capsysbinary.readouterr().err.decode()
