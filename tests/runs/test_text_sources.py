"""The training text of a run: its index, without one its corpus, and that it is never exported."""

import json
import os
import stat
import threading

import pytest

from support.runs import request, resume
from tgen import runs
from tgen.cli.app import run
from tgen.config.training import TrainConfig
from tgen.errors import ModelError
from tgen.inspection.sources import find_sources
from tgen.runs import saved_state
from tgen.runs.text_sources import open_training_text

SHORT = {"train": TrainConfig(steps=2)}
# Characters that the corpus has at its start, and once at its end, which is held out
SECRET = b"A secret 4711 sentence"
TEXT = (
    SECRET + b" begins the text.\n" + b"So many other words follow.\n" * 200 + b"held out 99 end\n"
)


def start(folder, name="model", text=TEXT, **values):
    (folder / "corpus.txt").write_bytes(text)
    list(runs.start(request(folder, name, **SHORT | values)))
    return folder / name


def sources(model, text):
    """Return the passages of a text with their places, and the warnings."""
    warnings = []
    report = find_sources(open_training_text(model, warnings.append), text)
    return [(one.text, one.occurrences, one.places) for one in report.passages], warnings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    command = ["train", "corpus.txt", "--index", "--steps", "2"]
    return start(tmp_path_factory.mktemp("run"), index=True, command=command)


def test_an_index_is_private_and_names_files_without_directories(model):
    path = saved_state.index_path(model)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(model.parent).encode() not in path.read_bytes()
    found, warnings = sources(model, SECRET)
    assert [(text, n, places[0].file, places[0].line) for text, n, places in found] == [
        (SECRET, 1, "corpus.txt", 1)
    ]
    assert not warnings


def test_held_out_text_is_no_training_text(model):
    assert sources(model, b"99") == ([], [])
    assert sources(model, b"4711")[0]


def test_no_export_and_no_card_has_the_text(model, tmp_path):
    for arguments in (["--to", "gguf"], ["--to", "transformers"]):
        out = tmp_path / arguments[1]
        assert run(["export", str(model), *arguments, "--out", str(out), "--quiet"]) == 0
        for path in [out] if out.is_file() else out.rglob("*"):
            assert "index" not in path.name
            assert SECRET not in path.read_bytes()
    card = (model / "README.md").read_text()
    assert "index" not in card
    assert "tgen train corpus.txt --steps 2\n" in card
    beside = {path.name for path in model.iterdir()} - {saved_state.folder(model).name}
    assert all(SECRET not in (model / name).read_bytes() for name in beside)


def test_without_an_index_the_unchanged_corpus_is_searched(model, tmp_path):
    plain = start(tmp_path)
    assert not saved_state.index_path(plain).exists()
    for text in (SECRET, b"many words follow", b"99", b"held out words"):
        assert sources(plain, text) == sources(model, text)
    (tmp_path / "corpus.txt").write_bytes(TEXT + b"x")
    with pytest.raises(ModelError, match=r"no index .* its corpus has changed") as caught:
        sources(plain, SECRET)
    assert "--index" in caught.value.hint
    (tmp_path / "corpus.txt").unlink()
    with pytest.raises(ModelError, match=r"no index .*corpus\.txt does not exist"):
        sources(plain, SECRET)


def test_a_model_without_a_run_and_a_corpus_from_stdin_are_errors(tmp_path):
    with pytest.raises(ModelError, match="has no run of tgen"):
        sources(tmp_path, SECRET)
    plain = start(tmp_path)
    path = saved_state.folder(plain) / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"corpus": ["-"]}))
    with pytest.raises(ModelError, match="its corpus came from stdin"):
        sources(plain, SECRET)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_corpus_from_a_pipe_is_recorded_as_stdin(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_bytes, args=[TEXT], daemon=True).start()
    plain = start(tmp_path, corpus=[str(pipe)])
    with pytest.raises(ModelError, match="its corpus came from stdin"):
        sources(plain, SECRET)


def test_damaged_indexes_and_those_of_other_runs_are_ignored(model, tmp_path):
    plain = start(tmp_path, text=TEXT + b"another end\n")
    path, index = saved_state.index_path(plain), saved_state.index_path(model).read_bytes()
    expected, _ = sources(plain, SECRET)
    for content, problem in ((index[:-9], "is damaged"), (index, "belongs to another corpus")):
        path.write_bytes(content)
        assert sources(plain, SECRET) == (expected, [f"{path} {problem} and is ignored"])
    (tmp_path / "corpus.txt").unlink()
    with pytest.raises(ModelError, match="has no intact index"):
        sources(plain, SECRET)


def test_a_new_run_and_a_removal_take_the_index_away(tmp_path):
    model = start(tmp_path, index=True)
    assert saved_state.index_path(model).exists()
    start(tmp_path, overwrite=True)
    assert not saved_state.index_path(model).exists()
    start(tmp_path, index=True, overwrite=True)
    assert run(["models", "rm", str(model), "--yes"]) == 0
    assert not model.exists()


def test_another_corpus_is_indexed_again(tmp_path):
    model = start(tmp_path, index=True)
    (tmp_path / "corpus.txt").write_bytes(TEXT.replace(b"4711", b"4712"))
    corpus = [str(tmp_path / "corpus.txt")]
    changes = {"settings": {"steps": 3}, "override": True, "corpus": corpus, "threads": 1}
    list(resume(model, **changes))
    (tmp_path / "corpus.txt").unlink()
    assert sources(model, b"4711") == ([], [])
    assert [text for text, *_ in sources(model, b"4712")[0]] == [b"4712"]


def test_conversations_and_directories(tmp_path):
    folder = tmp_path / "chats" / "deep"
    folder.mkdir(parents=True)
    pair = [{"role": "user", "content": "Ask {}?"}, {"role": "assistant", "content": "Say {}!"}]
    rows = [json.dumps({"messages": pair}).replace("{}", f"n{i}") for i in range(40)]
    (folder / "a.jsonl").write_text("\n".join(rows))
    values = {"overrides": {"context_length": None}, "corpus": [str(tmp_path / "chats")]}
    model = start(tmp_path, index=True, **values)
    found = {}
    for i in range(40):
        for text, n, places in sources(model, b"Ask n%d?" % i)[0]:
            if text == b"Ask n%d?" % i:
                found[i] = (n, places[0].file, places[0].line)
    assert 20 <= len(found) < 40  # some are held out
    assert all(place == (1, "chats/deep/a.jsonl", i + 1) for i, place in found.items())
    saved_state.index_path(model).unlink()
    assert all(sources(model, b"Ask n%d?" % i)[0][0][1] == 1 for i in found)
