"""A chat model with a long context, and a server for it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from support.chats import CHATML, SPECIAL
from support.command import tgen
from support.models import make_model
from support.servers import ServerProcess, serving
from tgen.checkpoint import model_dir
from tgen.config import EngineOptions
from tgen.loaded_model import LoadedModel, open_model
from tgen.python_api import Model
from tgen.tokenizer import Tokenizer

CONTEXT = 2048


@pytest.fixture(scope="session")
def chat_model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a random model with a chat template."""
    backend = Backend.from_str(tokenizer.json)
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    extended = Tokenizer(backend.to_str())
    model = make_model("llama", vocab_size=extended.vocab_size, context_length=CONTEXT)
    path = tmp_path_factory.mktemp("serve") / "tiny"
    model_dir.save(path, model.config, extended, model.to_arrays())
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_bytes())
    config |= {"eos_token": "<|im_end|>", "chat_template": CHATML}
    file.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def indexed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model that was trained with an index of its text, verses.txt."""
    folder = tmp_path_factory.mktemp("indexed")
    corpus = folder / "verses.txt"
    corpus.write_text("\nA rare line of words.\n" + "The cat sat on the mat.\n" * 200)
    tgen("train", corpus, "--steps", 2, "--size", "tiny", "--index", "--out", folder / "m", "-q")
    return folder / "m"


@pytest.fixture(scope="session")
def loaded(chat_model: Path) -> LoadedModel:
    """Return the same model in this process."""
    return open_model(chat_model, EngineOptions(device="cpu", threads=1))


@pytest.fixture(scope="session")
def alone(loaded: LoadedModel) -> Model:
    """Return the same model in this process, for texts that no other text accompanies."""
    return Model(loaded)


@pytest.fixture(scope="module")
def served(chat_model: Path) -> Iterator[ServerProcess]:
    """Return a server with a batch of four and the default limits."""
    with serving(chat_model, "--batch-size", 4) as server:
        yield server
