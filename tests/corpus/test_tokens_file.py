"""The tokens of a run on disk: read on demand, and never those of another text."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from support.corpora import tokenize as tokenize_all
from support.runs import contents, dry_run, request, resume
from tgen import corpus, runs
from tgen.checkpoint import safetensors_file
from tgen.config.training import TrainConfig
from tgen.corpus import TokenDataset, tokenize
from tgen.errors import TgenError, TrainingError
from tgen.reports.training import DoneReport
from tgen.runs import saved_state
from tgen.storage import files
from tgen.storage.disk_array import DiskArray
from tgen.tokenizer import train_char

CHAR = train_char([b"abc"])
RUN = {"corpus_sha256": "c", "tokenizer_sha256": "t"}


@pytest.fixture
def on_disk(monkeypatch):
    """No array is small enough for RAM."""
    monkeypatch.setattr(safetensors_file, "IN_MEMORY", -1)
    monkeypatch.setattr(tokenize, "IN_MEMORY", 50)
    monkeypatch.setattr("tgen.storage.disk_array._BLOCK", 64)


def save_and_load(out, arrays):
    (out / "training").mkdir(parents=True, exist_ok=True)
    return saved_state.load_tokens(out, saved_state.save_tokens(out, RUN, arrays))


@given(
    st.lists(st.tuples(st.binary(max_size=30), st.binary(max_size=20)), min_size=3, max_size=30),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([0.0, 0.4]),
)
@settings(deadline=None, max_examples=60)
def test_batches_from_disk_equal_those_from_memory(
    tmp_path_factory, tokenizer, rows, context_length, masked, bpe_dropout
):
    rows = [(first, b"end" + second) for first, second in rows]
    documents = rows if masked else [(first + second,) for first, second in rows]
    sides = [tokenize_all(part, tokenizer) for part in (documents[:-1], documents[-1:])]
    arrays = corpus.token_arrays(*sides)
    options = dict(
        val_bytes=1,
        context_length=min(context_length, len(sides[0].ids) - 1),
        batch_size=3,
        seed=5,
        end_of_text=tokenizer.end_of_text,
        merge_pairs=tokenizer.merge_pairs,
    )
    memory = TokenDataset(*sides, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "IN_MEMORY", -1)
        patch.setattr("tgen.storage.disk_array._BLOCK", 64)
        loaded = save_and_load(tmp_path_factory.mktemp("run"), arrays)
        assert all(isinstance(array, DiskArray) for array in loaded.values())
        disk = TokenDataset(*corpus.tokens_of(loaded), **options)
        assert disk.train.n_targets == memory.train.n_targets
        assert disk.val.n_targets == memory.val.n_targets
        pairs = [
            *(
                (d.batch(step, bpe_dropout=bpe_dropout) for d in (memory, disk))
                for step in range(4)
            ),
            *zip(memory.val_windows(40), disk.val_windows(40), strict=True),
            *zip(memory.train_windows(40), disk.train_windows(40), strict=True),
        ]
        for here, there in pairs:
            for one, other in zip(here, there, strict=True):
                assert (one is None) == (other is None)
                assert one is None or (np.array_equal(one, other) and one.dtype == other.dtype)


@pytest.mark.usefixtures("on_disk")
def test_safetensors_library_reads_the_file(tmp_path):
    text = tokenize_all([(b"ab", b"c" * 90), (b"a", b"b")], CHAR)
    assert isinstance(text.ids, DiskArray)
    assert isinstance(text.loss_mask, DiskArray)
    arrays = corpus.token_arrays(text, tokenize_all([(b"cab",)], CHAR))
    loaded = save_and_load(tmp_path, arrays)
    expected = load_file(tmp_path / "training" / "tokens.safetensors")
    assert set(expected) == set(loaded) == {"train", "train_loss_mask", "val"}
    for name, array in expected.items():
        assert array.tolist() == loaded[name][:].tolist() == arrays[name][:].tolist()
        assert array.dtype == arrays[name].dtype


def test_run_that_reads_tokens_from_disk_equals_run_from_memory(tmp_path, monkeypatch):
    list(runs.start(request(tmp_path, "memory")))
    monkeypatch.setattr(safetensors_file, "IN_MEMORY", -1)
    monkeypatch.setattr(tokenize, "IN_MEMORY", 50)
    list(runs.start(request(tmp_path, "disk")))
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A folder with a whole run, and one that was interrupted after step 6."""
    folder = tmp_path_factory.mktemp("runs")
    list(runs.start(request(folder, "whole")))
    stops = iter([False] * 6 + [True])
    list(runs.start(request(folder), stopped=lambda: next(stops)))
    return folder


@pytest.fixture
def paused(both, tmp_path):
    """A copy of the run that was interrupted."""
    shutil.copytree(both, tmp_path, dirs_exist_ok=True)
    return tmp_path / "model"


def flip_last_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit": flip_last_bit,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tokens_are_an_error_and_recreated_from_the_same_corpus(
    tmp_path, paused, finished_run, damage
):
    path = paused / "training" / "tokens.safetensors"
    good = path.read_bytes()
    DAMAGES[damage](path)
    with pytest.raises(TrainingError, match=r"tokens\.safetensors is (missing|damaged)"):
        list(resume(paused, threads=1))
    done = list(resume(paused, corpus=[str(tmp_path / "corpus.txt")], threads=1))[-1]
    assert isinstance(done, DoneReport)
    assert done.finished
    assert path.read_bytes() == good
    weights = [out / "model.safetensors" for out in (paused, finished_run / "model")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_tokens_of_another_corpus_are_never_used(tmp_path, paused):
    (tmp_path / "other.txt").write_bytes((tmp_path / "corpus.txt").read_bytes().swapcase())
    other = request(tmp_path, "other", corpus=[str(tmp_path / "other.txt")])
    list(runs.start(other))
    files.publish(
        paused / "training" / "tokens.safetensors",
        (tmp_path / "other" / "training" / "tokens.safetensors").read_bytes(),
    )
    with pytest.raises(TrainingError, match="is damaged or belongs to another run"):
        list(resume(paused, threads=1))
    with pytest.raises(TrainingError, match="the corpus has changed"):
        list(resume(paused, corpus=[str(tmp_path / "other.txt")], threads=1))


def test_resuming_with_another_tokenizer_is_an_error(paused):
    path = paused / "training" / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(TrainingError, match=r"tokenizer\.json has changed"):
        list(resume(paused, threads=1))


@pytest.mark.parametrize("name", ["tokens", "tokenizer_sha256", "read_bytes", "exact_epochs"])
def test_run_record_without_what_every_version_wrote_is_an_error(paused, name):
    path = paused / "training" / "run.json"
    run = json.loads(path.read_text())
    del run[name]
    path.write_text(json.dumps(run))
    with pytest.raises(TrainingError, match=r"run\.json is damaged"):
        list(resume(paused, threads=1))


@pytest.mark.usefixtures("on_disk")
def test_tokens_file_truncated_during_a_run_is_an_error(tmp_path):
    arrays = corpus.token_arrays(tokenize_all([(b"abc" * 40,)], CHAR), tokenize_all([], CHAR))
    loaded = save_and_load(tmp_path, arrays)
    path = tmp_path / "training" / "tokens.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TgenError, match="became shorter while it was read"):
        loaded["train"][:]


@pytest.mark.usefixtures("on_disk")
def test_dry_run_tokenizes_everything_and_writes_nothing(tmp_path):
    plan = dry_run(request(tmp_path, train=TrainConfig(steps=3)))
    assert plan.train_tokens > 100
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]
