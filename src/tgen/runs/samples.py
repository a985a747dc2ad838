"""Generate text during and after a training run."""

from collections.abc import Iterator, Sequence

from tgen.config import SamplingConfig
from tgen.engine.torch_engine import TorchEngine
from tgen.generation.loop import generate
from tgen.model.transformer import Transformer
from tgen.reports.training import SampleReport
from tgen.runs.prepare import PreparedRun
from tgen.tokenizer import Tokenizer
from tgen.training.state import TrainState

_SAMPLE_TOKENS = 120


def sample(prepared: PreparedRun, state: TrainState) -> Iterator[SampleReport]:
    """Generate one continuation of the run's prompt, with the step as the seed; on rank 0 only."""
    model = state.whole_model()
    if model is None:
        return
    record, tokenizer = prepared.record, prepared.tokenizer
    prompt, step = record.sample_prompt, state.progress.step
    if record.chat is not None:
        ids, stop = record.chat.sample_ids, [record.chat.end_id]
        (text,) = _generate(model, tokenizer, [ids], _SAMPLE_TOKENS, stop=stop, seed=step)
    else:
        (text,) = generate_texts(model, tokenizer, [prompt], _SAMPLE_TOKENS, seed=step)
    yield SampleReport(step=step, prompt=prompt, text=text)


def generate_texts(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[bytes], n_tokens: int, *, seed: int
) -> list[bytes]:
    """Generate a continuation of each prompt; all prompts must be equal."""
    ids = tokenizer.encode_prompt(prompts[0])[-model.config.context_length :]
    if not ids:  # an empty prompt and a tokenizer without an end-of-text token
        return [b"" for _ in prompts]
    stop = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    return _generate(model, tokenizer, [ids for _ in prompts], n_tokens, stop=stop, seed=seed)


def _generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    *,
    stop: Sequence[int],
    seed: int,
) -> list[bytes]:
    """Generate a continuation of each prompt."""
    texts: list[list[int]] = [[] for _ in prompts]
    sampling = SamplingConfig(max_new_tokens=n_tokens, seed=seed)
    tokens = generate(TorchEngine(model), prompts, stop=stop, sampling=sampling)
    for token in tokens:
        texts[token.sequence].append(token.id)
    return [tokenizer.decode(text, continuation=True) for text in texts]
