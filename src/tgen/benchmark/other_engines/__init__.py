"""Other inference engines on the same weights, for `tgen bench --against`."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tgen.config import StoredAs
from tgen.errors import UsageError
from tgen.lora import model_with_adapter

if TYPE_CHECKING:
    from tgen.benchmark.other_engines.llama_cpp_backend import LlamaCppBackend
    from tgen.benchmark.other_engines.transformers_backend import TransformersBackend

# Per engine: the modules that it needs, and the packages that contain them.
OTHER_ENGINES = {
    "transformers": {"transformers": "transformers"},
    "llama.cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"},
}
REMARKS = {"llama.cpp": "; llama.cpp uses llama-bench's defaults, with a float16 KV cache"}


def open_other_engine(
    name: str,
    path: Path,
    *,
    threads: int,
    dtype: StoredAs,
    tokens: Sequence[int],
    exact: bool = False,
) -> "TransformersBackend | LlamaCppBackend":
    """Open an engine of `OTHER_ENGINES` on the CPU, with the matrices stored as `dtype`.

    `tokens` is one context of ids, the input of every sequence. The engine runs with its own
    defaults; `exact` makes everything but the weights float32. Raises UsageError if it is not
    installed or does not support `dtype`, ModelError if it cannot run this model.
    """
    needed = OTHER_ENGINES[name].items()
    missing = [package for module, package in needed if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"--against {name} needs {' and '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    if name == "transformers":  # each is imported only when used
        from tgen.benchmark.other_engines.transformers_backend import TransformersBackend

        if path.is_file():
            raise UsageError(
                f"--against transformers needs a model directory (got the file {path})",
                "convert it: `tgen export FILE --to transformers --out DIR`",
            )
        return TransformersBackend(path, threads=threads, dtype=dtype, tokens=tokens)
    from tgen.benchmark.other_engines.llama_cpp_backend import LlamaCppBackend

    bundle = model_with_adapter.load(path)
    return LlamaCppBackend(
        bundle.config, bundle.arrays, threads=threads, dtype=dtype, tokens=tokens, exact=exact
    )
