"""The process that `end_to_end` times: it generates a text as `tgen generate` does.

It reads one JSON object from stdin and writes one line of JSON to stdout, with the
time.monotonic_ns at the end of each phase. Errors are one line on stderr.
"""

import sys
import time

_STARTED = time.monotonic_ns()  # before any other import


def main() -> None:
    """Generate a text and write the end time of each phase; a failure sets the exit status."""
    import json
    from importlib import import_module

    from tgen.errors import TgenError

    request = json.loads(sys.stdin.buffer.read())
    for name in request.pop("modules"):
        import_module(name)
    try:
        answer = _generate(**request)
    except TgenError as error:
        sys.exit(error.message)
    sys.stdout.write(json.dumps(answer) + "\n")


def _generate(
    *,
    path: str,
    prompt: str,
    n_gen: int,
    device: str,
    threads: int | None,
    dtype: str | None,
    cache_dtype: str | None,
    draft: str,
) -> dict[str, object]:
    """`prompt` and the returned text are bytes decoded as Latin-1."""
    from dataclasses import replace
    from pathlib import Path
    from typing import Any

    from tgen.config import SamplingConfig
    from tgen.engine.open_engine import open_engine
    from tgen.loaded_model import LoadedModel
    from tgen.lora.merging import load
    from tgen.machine.description import peak_memory_bytes

    ends = {"start": _STARTED, "import": time.monotonic_ns()}
    bundle = load(Path(path))
    ends["load"] = time.monotonic_ns()
    options: Any = {
        "dtype": dtype,
        "cache_dtype": cache_dtype,
        "draft": draft,
    }  # checked where they are used
    engine = open_engine(
        bundle,
        device=device,
        threads=threads,
        dtype=options["dtype"],
        cache_dtype=options["cache_dtype"],
    )
    model = LoadedModel(replace(bundle, arrays={}), engine)  # the engine has its own copy
    _ = model.vocabulary, model.ngrams
    ends["engine"] = time.monotonic_ns()
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=n_gen)
    ids = model.encode(prompt.encode("latin-1"))
    tokens = model.tokens([ids], sampling=sampling, draft=options["draft"])
    generated = [next(tokens)]
    ends["prefill"] = time.monotonic_ns()
    generated += tokens
    ends["decode"] = time.monotonic_ns()
    text = b"".join(piece for _, piece in model.pieces(generated))
    ends["detokenize"] = time.monotonic_ns()
    return {
        "phase_ends": ends,
        "n_prompt": len(ids),
        "n_gen": len(generated),
        "text": text.decode("latin-1"),
        "peak_memory_bytes": peak_memory_bytes(),
    }


if __name__ == "__main__":
    main()
