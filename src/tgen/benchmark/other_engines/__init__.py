"""Other programs on the same weights, to be timed beside ours: `tgen bench --against`."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

from tgen.benchmark.throughput import Backend
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_dir import ModelBundle
from tgen.config import StoredAs
from tgen.engine.base import Logits
from tgen.errors import UsageError

REMARKS = {"llama.cpp": "; llama.cpp as llama-bench sets it, keys and values as float16"}
# A peer: the modules that it needs, and what brings them.
PEERS = {
    "transformers": {"transformers": "transformers"},
    "llama.cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"},
}


class Peer(Backend, Protocol):
    """An arm that is not ours."""

    def logits(self) -> Logits:
        """(B, V), float32: what the last prompt or step gave; a copy."""

    def close(self) -> None:
        """Lets go of the model; nothing may be asked of it afterwards."""


def open_peer(
    name: str,
    bundle: ModelBundle,
    *,
    threads: int,
    stored: StoredAs,
    tokens: Sequence[int],
    exact: bool = False,
) -> Peer:
    """`name` of `PEERS` with the model of `bundle.path`, on the processor, matrices as `stored`.

    The weights are read anew, since an engine of ours takes them out of its bundle. `tokens`: as
    many as the context holds; every row holds the beginning of them. The peer is set as it is by
    itself, but for `exact` with nothing in less than float32 but the weights. Raises UsageError if
    it is unknown, not installed or holds no weights so, ModelError if it cannot run this model.
    """
    if name not in PEERS:
        raise UsageError(f"--against {name} is unknown", f"choose one of {', '.join(PEERS)}")
    missing = [package for module, package in PEERS[name].items() if find_spec(module) is None]
    if missing:
        needed = " and ".join(missing)
        raise UsageError(f"--against {name} needs {needed}", f"pip install {' '.join(missing)}")
    if name == "transformers":  # each is imported only where it is asked for
        from tgen.benchmark.other_engines.transformers_backend import Transformers

        if bundle.path.is_file():
            raise UsageError(
                f"--against transformers takes no file, and {bundle.path} is one",
                "`tgen export FILE --to transformers --out DIR` makes a directory of it",
            )
        return Transformers(bundle.path, threads=threads, stored=stored, tokens=tokens)
    from tgen.benchmark.other_engines.llama_cpp_backend import LlamaCpp

    arrays = model_dir.load(bundle.path).arrays
    return LlamaCpp(
        bundle.config, arrays, threads=threads, stored=stored, tokens=tokens, exact=exact
    )
