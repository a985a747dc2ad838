"""One engine in its own process and Python environment, for `versus.decode.runtimes`.

Environments of other engines contain neither tgen nor torch necessarily: this file imports only
the engine that it runs. Requests are JSON lines on stdin, replies are JSON lines on stdout.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from runpy import run_module
from typing import Any

Prompts = Sequence[Sequence[int]]
# The seconds from the start to each new token of a batch, and the nats of each window's ids
# after the first.
Generate = Callable[[Prompts, int], list[float]]
Score = Callable[[Prompts], float]

PACKAGES = {
    "tgen": "tgen-lm",
    "openvino": "openvino-genai",
    "onnxruntime": "onnxruntime-genai",
    "ctranslate2": "ctranslate2",
    "torch": "torch",
}


def convert(engine: str, source: str, target: str, dtype: str) -> None:
    """Convert a transformers directory for an engine; tgen and torch read it as it is."""
    if engine == "openvino":
        optimum: Any = import_module("optimum.intel")
        quantized = {"quantization_config": optimum.OVWeightQuantizationConfig(bits=8, sym=True)}
        settings = quantized if dtype == "int8" else {"load_in_8bit": False}
        model = optimum.OVModelForCausalLM.from_pretrained(
            source, export=True, compile=False, **settings
        )
        model.save_pretrained(target)
    elif engine == "onnxruntime":
        precision = {"float32": "fp32", "bfloat16": "bf16"}.get(dtype, dtype)
        sys.argv = ["builder", "-i", source, "-o", target, "-p", precision, "-e", "cpu"]
        sys.argv += ["-c", f"{target}/cache", "--extra_options", "prune_lm_head=true"]
        run_module("onnxruntime_genai.models.builder", run_name="__main__")
    elif engine == "ctranslate2":
        converters: Any = import_module("ctranslate2.converters")
        converters.TransformersConverter(source).convert(target, quantization=dtype)


def open_tgen(path: str, dtype: str, threads: int, _brief: bool) -> tuple[Generate, Score]:
    """Open tgen's CPU engine; n-gram drafts are off, since the other engines have none."""
    from tgen.config import EngineOptions, SamplingConfig
    from tgen.generation.logprobs import block_nll, predictions
    from tgen.loaded_model import Decoding, open_model

    options: Any = {"dtype": dtype, "threads": threads}
    model = open_model(Path(path), EngineOptions(device="cpu", kind="kernels", **options))
    model.request([0], SamplingConfig())  # the tables of the vocabulary

    def generate(prompts: Prompts, n: int) -> list[float]:
        sampling = SamplingConfig(temperature=0, max_new_tokens=n, ignore_eos=True)
        start, times = time.perf_counter(), []
        for _ in model.tokens(prompts, sampling=sampling, decoding=Decoding(draft="off")):
            times.append(time.perf_counter() - start)
        return times[len(prompts) - 1 :: len(prompts)]

    def score(windows: Prompts) -> float:
        return sum(
            block_nll(logits, targets)
            for window in windows
            for logits, targets in predictions(model.engine, window, 1)
        )

    return generate, score


def open_openvino(path: str, dtype: str, threads: int, _brief: bool) -> tuple[Generate, Score]:
    """Open OpenVINO GenAI with its latency hint and a cache of the compiled model.

    Its attention is SDPA: paged attention took twice as long per token with one sequence.
    """
    import numpy as np

    openvino: Any = import_module("openvino")
    genai: Any = import_module("openvino_genai")
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "CACHE_DIR": str(Path(path, "cache")),
    }
    if dtype != "int8":  # int8: its default for this CPU
        properties["INFERENCE_PRECISION_HINT"] = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    pipeline = genai.LLMPipeline(path, "CPU", ATTENTION_BACKEND="SDPA", **properties)

    def generate(prompts: Prompts, n: int) -> list[float]:
        ids = np.array(prompts, np.int64)
        settings = genai.GenerationConfig()
        settings.max_new_tokens, settings.do_sample = n, False
        settings.ignore_eos, settings.eos_token_id = True, -1
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        result = pipeline.generate(inputs, settings)
        end = time.perf_counter() - start
        first = result.perf_metrics.raw_metrics.m_times_to_first_token[0] / 1e6  # µs
        return [first] if n == 1 else [first, *[float("nan")] * (n - 2), end]

    def score(windows: Prompts) -> float:
        file = Path(path, "openvino_model.xml")
        request = openvino.Core().compile_model(file, "CPU", properties).create_infer_request()
        nats = 0.0
        for window in windows:
            ids = np.array([window[:-1]], np.int64)
            request.reset_state()
            request.infer(
                {
                    "input_ids": ids,
                    "attention_mask": np.ones_like(ids),
                    "position_ids": np.arange(ids.size)[None],
                    "beam_idx": np.zeros(1, np.int32),
                }
            )
            nats += sum_nats(request.get_tensor("logits").data[0], window[1:])
        return nats

    return generate, score


def open_onnxruntime(path: str, _dtype: str, threads: int, _brief: bool) -> tuple[Generate, Score]:
    """Open ONNX Runtime GenAI."""
    import numpy as np

    genai: Any = import_module("onnxruntime_genai")
    config = genai.Config(path)
    session = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": session}}))
    model = genai.Model(config)

    def make_generator(n_sequences: int, length: int) -> Any:
        parameters = genai.GeneratorParams(model)
        options = {"batch_size": n_sequences, "max_length": length, "min_length": length}
        parameters.set_search_options(do_sample=False, **options)
        return genai.Generator(model, parameters)

    def generate(prompts: Prompts, n: int) -> list[float]:
        ids = np.array(prompts, np.int32)
        start, times = time.perf_counter(), []
        generator = make_generator(len(prompts), ids.shape[1] + n)
        generator.append_tokens(ids)
        for _ in range(n):
            generator.generate_next_token()
            times.append(time.perf_counter() - start)
        return times

    def score(windows: Prompts) -> float:
        nats = 0.0
        for window in windows:
            generator = make_generator(1, len(window))
            for i, target in pairwise(window):  # only the last has logits
                generator.append_tokens(np.array([[i]], np.int32))
                nats += sum_nats(np.asarray(generator.get_logits()).reshape(1, -1), [target])
        return nats

    return generate, score


def open_ctranslate2(path: str, dtype: str, threads: int, _brief: bool) -> tuple[Generate, Score]:
    """Open CTranslate2."""
    ctranslate2: Any = import_module("ctranslate2")
    model = ctranslate2.Generator(
        path, device="cpu", compute_type=dtype, inter_threads=1, intra_threads=threads
    )
    names = json.loads(Path(path, "vocabulary.json").read_text(encoding="utf-8"))

    def generate(prompts: Prompts, n: int) -> list[float]:
        tokens = [[names[i] for i in prompt] for prompt in prompts]
        start, times = time.perf_counter(), []

        def note_time(_step: object) -> bool:
            times.append(time.perf_counter() - start)
            return False

        model.generate_batch(
            tokens,
            sampling_topk=1,
            min_length=n,
            max_length=n,
            include_prompt_in_result=False,
            end_token=[],
            callback=note_time,
        )
        return times[len(prompts) - 1 :: len(prompts)]

    def score(windows: Prompts) -> float:
        results = model.score_batch([[names[i] for i in window] for window in windows])
        return -sum(sum(result.log_probs) for result in results)

    return generate, score


def open_torch(path: str, dtype: str, threads: int, brief: bool) -> tuple[Generate, Score]:
    """Open PyTorch: transformers' model with a static cache; decoding is compiled unless `brief`.

    Prefills are not, since every length would be compiled anew. int8 is torchao's, with a scale per
    row.
    """
    import torch

    transformers: Any = import_module("transformers")
    torch.set_num_threads(threads)
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval()
    if dtype == "int8":
        torchao: Any = import_module("torchao.quantization")
        # The output matrix is quantized, the embedding that it shares weights with is not.
        weight = model.lm_head.weight.detach().clone()
        model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    caches: dict[tuple[int, int], Any] = {}
    compiled: Any = model.forward if brief else torch.compile(model.forward, dynamic=False)

    @torch.inference_mode()
    def generate(prompts: Prompts, n: int) -> list[float]:
        ids = torch.tensor(prompts)
        size = len(prompts), -(-(ids.shape[1] + n) // 64) * 64
        if size not in caches:  # the compiled code is that of one cache
            caches[size] = transformers.StaticCache(model.config, max_cache_len=size[1])
        start, times = time.perf_counter(), []
        cache = caches[size]
        cache.reset()
        positions = torch.arange(ids.shape[1])
        for i in range(n):
            logits = (compiled if i else model)(
                input_ids=ids,
                past_key_values=cache,
                position_ids=positions[None].expand(len(prompts), -1),
                logits_to_keep=1,
                use_cache=True,
            ).logits
            ids, positions = logits[:, -1].argmax(-1, keepdim=True), positions[-1:] + 1
            times.append(time.perf_counter() - start)
        return times

    @torch.inference_mode()
    def score(windows: Prompts) -> float:
        return sum(
            sum_nats(model(torch.tensor([window[:-1]])).logits[0].float().numpy(), window[1:])
            for window in windows
        )

    return generate, score


def sum_nats(logits: Any, targets: Sequence[int]) -> float:
    """Return the negative log-likelihood, in nats, of the ids (n,) under their logits (n, V)."""
    import numpy as np

    logits = np.asarray(logits, np.float64)
    largest = logits.max(axis=1)
    total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return float((total - logits[np.arange(len(targets)), targets]).sum())


def peak_memory() -> int:
    """Return the peak resident memory in bytes, without that of the parent before exec."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main(arguments: Sequence[str]) -> None:
    """Convert a model, or open it and answer requests until stdin ends."""
    task, engine, *rest = arguments
    if task == "convert":
        convert(engine, *rest)
        return
    path, dtype, threads = rest
    openers = {
        "tgen": open_tgen,
        "openvino": open_openvino,
        "onnxruntime": open_onnxruntime,
        "ctranslate2": open_ctranslate2,
        "torch": open_torch,
    }
    # Libraries print to stdout too, so that replies have a stream of their own.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate, score = openers[engine](path, dtype, int(threads), task == "start")
    for line in sys.stdin:
        request = json.loads(line)
        if "windows" in request:
            reply: Any = score(request["windows"])
        elif "prompts" in request:
            reply = generate(request["prompts"], request["n"])
        else:
            reply = {"peak": peak_memory(), "version": version(PACKAGES[engine])}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
