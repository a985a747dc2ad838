"""Opening a model: data types, and that both engines generate the same text."""

import subprocess
import sys
from dataclasses import replace

import pytest

from support.models import cpu_engine
from tgen.checkpoint import model_dir
from tgen.checkpoint.dtypes import to_bfloat16
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import EngineOptions, SamplingConfig
from tgen.engine.choose_engine import missing_kernels
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.open_engine import open_engine
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.generation.loop import generate
from tgen.model.transformer import Transformer

SHIPPED = model_dir.load(shipped_model())
FLOAT32 = Transformer.from_arrays(SHIPPED.config, SHIPPED.arrays).to_arrays()
BUNDLE = replace(SHIPPED, arrays=FLOAT32)
GREEDY = SamplingConfig(temperature=0, max_new_tokens=200)


def test_quantized_files_are_stored_as_int8_unless_told():
    for dtype, expected in [(None, "int8"), ("float32", "float32")]:
        quantized = replace(BUNDLE, arrays=dict(BUNDLE.arrays), quantized=True)
        assert (
            open_engine(quantized, EngineOptions(device="cpu", threads=1, dtype=dtype)).dtype
            == expected
        )


def test_greedy_texts_equal_the_torch_engines():
    tokenizer = BUNDLE.tokenizer
    starts = b"What is|The king|ROMEO:|O, |To be".split(b"|")
    prompts = [tokenizer.encode_prompt(start + end) for start in starts for end in (b"", b" the")]
    reference = TorchEngine(Transformer.from_arrays(BUNDLE.config, BUNDLE.arrays))
    engine = cpu_engine(BUNDLE.config, dict(BUNDLE.arrays), n_threads=2)
    texts: list[list[list[int]]] = [[[] for _ in prompts] for _ in range(2)]
    for text, tested in zip(texts, (reference, engine), strict=True):
        for token in generate(tested, prompts, sampling=GREEDY):
            text[token.sequence].append(token.id)
    for prompt, expected, ids in zip(prompts, *texts, strict=True):
        if expected != ids:  # only at a tie of two tokens, within rounding
            at = next(
                i for i, pair in enumerate(zip(expected, ids, strict=True)) if pair[0] != pair[1]
            )
            engine.rewind([0])
            engine.select([0])
            logits = engine.extend([(prompt + expected[:at])[-BUNDLE.config.context_length :]])[0]
            assert abs(logits[expected[at]] - logits[ids[at]]) < 2e-4


def test_only_the_kernels_choose_the_dtype_of_the_cache():
    for dtype, cache, expected in [
        (None, None, "float32"),
        ("bfloat16", None, "float16"),
        ("int8", None, "float16"),
        ("int8", "float32", "float32"),
        (None, "float16", "float16"),
        (None, "int8", "int8"),
    ]:
        bundle = replace(BUNDLE, arrays=dict(BUNDLE.arrays))
        engine = open_engine(
            bundle, EngineOptions(device="cpu", dtype=dtype, cache_dtype=cache, threads=1)
        )
        assert engine.cache_dtype == expected
    for cache in ("float16", "int8"):
        with pytest.raises(UsageError, match=f"cache_dtype {cache} needs the compiled kernels"):
            open_engine(bundle, EngineOptions(device="cpu", kind="torch", cache_dtype=cache))


def test_weights_keep_the_dtype_of_the_file_by_default():
    arrays = {n: to_bfloat16(a) if a.ndim == 2 else a for n, a in BUNDLE.arrays.items()}
    narrow = replace(BUNDLE, arrays=arrays)
    half = replace(BUNDLE, arrays={n: a.astype("f2") for n, a in BUNDLE.arrays.items()})
    with pytest.raises(UsageError, match="dtype float16 needs CUDA"):
        open_engine(half, EngineOptions(device="cpu", dtype="float16"))
    for bundle, dtype, expected in [
        (half, None, "float32"),
        (BUNDLE, None, "float32"),
        (narrow, None, "bfloat16"),
        (BUNDLE, "int8", "int8"),
        (narrow, "float32", "float32"),
    ]:
        copy = replace(bundle, arrays=dict(bundle.arrays))  # the engine takes them
        engine = open_engine(copy, EngineOptions(device="cpu", threads=1, dtype=dtype))
        assert isinstance(engine, CpuEngine)
        assert engine.dtype == expected


def test_without_kernels_torch_runs_in_float32(monkeypatch):
    monkeypatch.setenv("TGEN_KERNELS", "0")
    missing_kernels.cache_clear()
    try:
        assert isinstance(open_engine(BUNDLE, EngineOptions(device="cpu", threads=1)), TorchEngine)
        with pytest.raises(UsageError, match="dtype int8") as error:
            open_engine(BUNDLE, EngineOptions(device="cpu", dtype="int8"))
        assert "TGEN_KERNELS" in error.value.message
    finally:
        missing_kernels.cache_clear()


def test_kernels_run_without_importing_torch_or_the_compiler():
    code = (
        "import sys; from tgen import load; model = load(sys.argv[1], device='cpu'); "
        "print(model.generate('What is', max_new_tokens=3)); "
        "assert not {'torch', 'transformers', 'tgen.engine.cpu.compiler'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(shipped_model())], check=True)
