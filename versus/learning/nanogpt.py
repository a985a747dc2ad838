"""nanoGPT's CPU recipe, run in a copy that leaves the checkout unchanged.

nanoGPT reads data/<dataset>/ and writes checkpoints beside its train.py. The copy has the files
that a run needs, and the corpus as train.bin, val.bin and meta.pkl, as written by nanoGPT's
data/shakespeare_char/prepare.py.
"""

import contextlib
import importlib.util
import io
import pickle
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgen.errors import TrainingError, UsageError
from versus.learning.scoring import Predictor

# From nanoGPT's README.md, "I only have a macbook (or other cheap computer)".
RECIPE = {
    "device": "cpu",
    "compile": False,
    "eval_iters": 20,
    "log_interval": 1,
    "block_size": 64,
    "batch_size": 12,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "dropout": 0.0,
}
ITERATIONS = 2000
_EVAL_INTERVAL = 250  # config/train_shakespeare_char.py
_FILES = ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py")
_SEED_LINE = "torch.manual_seed(1337 + seed_offset)"
_TRAIN_FRACTION = 0.9


def validation_text(text: str) -> bytes:
    """Return prepare.py's validation text: the last tenth of the characters."""
    return text[int(len(text) * _TRAIN_FRACTION) :].encode()


def check_checkout(checkout: Path) -> None:
    """Raise UsageError if `checkout` is not a nanoGPT checkout."""
    missing = [name for name in _FILES if not (checkout / name).is_file()]
    if missing:
        raise UsageError(
            f"{str(checkout)!r} is not a nanoGPT checkout: {', '.join(missing)} missing",
            "git clone https://github.com/karpathy/nanoGPT and pass its path",
        )


def make_workspace(checkout: Path, folder: Path, text: str) -> None:
    """Copy the files that a run needs into `folder` and write the corpus there."""
    check_checkout(checkout)
    for name in _FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkout / name, folder / name)
    data = folder / "data" / "corpus"
    data.mkdir(parents=True)
    characters = sorted(set(text))
    ids = _ids(text, _alphabet(characters)).astype(np.uint16)
    split = int(len(text) * _TRAIN_FRACTION)
    ids[:split].tofile(data / "train.bin")
    ids[split:].tofile(data / "val.bin")
    meta = {
        "vocab_size": len(characters),
        "itos": dict(enumerate(characters)),
        "stoi": {character: i for i, character in enumerate(characters)},
    }
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))


def train_command(folder: Path, seed: int, iterations: int) -> list[str]:
    """Return the training command, to be run in `folder`; it writes out-<seed>/."""
    script = (folder / "train.py").read_text(encoding="utf-8")
    if script.count(_SEED_LINE) != 1:
        raise UsageError(
            f"train.py must contain {_SEED_LINE!r} once", "check out nanoGPT's master branch"
        )
    patched = f"train_{seed}.py"
    (folder / patched).write_text(
        script.replace(_SEED_LINE, f"torch.manual_seed({seed} + seed_offset)"), encoding="utf-8"
    )
    settings = RECIPE | {
        "max_iters": iterations,
        "lr_decay_iters": iterations,
        "eval_interval": min(_EVAL_INTERVAL, iterations),
        "dataset": "corpus",
        "out_dir": f"out-{seed}",
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, patched, "config/train_shakespeare_char.py", *options]


def load(folder: Path, seed: int) -> tuple[Predictor, dict[str, Any]]:
    """Return the last checkpoint of a run, its step and its number of parameters."""
    path = folder / f"out-{seed}" / "ckpt.pt"
    if not path.exists():
        raise TrainingError("nanoGPT wrote no checkpoint", "use a larger --max-iters")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model = make_model(folder / "model.py", **checkpoint["model_args"]).eval()
    model.load_state_dict(checkpoint["model"])
    meta = pickle.loads((folder / "data" / "corpus" / "meta.pkl").read_bytes())
    alphabet = _alphabet(list(meta["stoi"]))

    def logits(tokens: Tensor) -> Tensor:
        # Without targets nanoGPT returns the logits of the last position only.
        values: Tensor = model(tokens, tokens.contiguous())[0]
        return values

    predictor = Predictor(
        encode=lambda data: _ids(data.decode(), alphabet),
        logits=logits,
        context_length=checkpoint["model_args"]["block_size"],
    )
    details = {
        "checkpoint_step": checkpoint["iter_num"],
        "n_parameters": sum(p.numel() for p in model.parameters()),
    }
    return predictor, details


def make_model(path: Path, **arguments: Any) -> torch.nn.Module:
    """Return a GPT of the model.py at `path`; `arguments` are those of its GPTConfig."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its number of parameters
        model: torch.nn.Module = module.GPT(module.GPTConfig(**arguments))
    return model


def _alphabet(characters: list[str]) -> NDArray[np.uint32]:
    """Return the code points of sorted characters, which are sorted too."""
    return np.array([ord(character) for character in characters], np.uint32)


def _ids(text: str, alphabet: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return each character's index in the alphabet, which has all characters of the corpus."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return np.searchsorted(alphabet, points).astype(np.int64)
