"""Texts that a run's model writes: its samples, and those that other reports need."""

from collections.abc import Generator, Iterator, Sequence

from tgen.config import SamplingConfig
from tgen.corpus.steps import finish
from tgen.engine.torch_engine import TorchEngine
from tgen.generation.loop import generate
from tgen.model.transformer import Transformer
from tgen.planning import side_work
from tgen.reports.training import SampleReport
from tgen.runs.prepare import PreparedRun
from tgen.tokenizer import Tokenizer
from tgen.training.state import TrainState


def sample(prepared: PreparedRun, state: TrainState) -> Iterator[SampleReport]:
    """Generate one continuation of the run's prompt, with the step as the seed; on rank 0 only."""
    model = state.whole_model()
    if model is None:
        return
    record, tokenizer = prepared.record, prepared.tokenizer
    prompt, step = record.sample_prompt, state.progress.step
    n_tokens = min(side_work.SAMPLE_TOKENS, record.plan.generated_tokens)
    if record.chat is not None:
        ids, stop = record.chat.sample_ids, [record.chat.end_id]
        (text,) = finish(_generate(model, tokenizer, [ids], n_tokens, stop=stop, seed=step))
    else:
        (text,) = finish(generate_texts(model, tokenizer, [prompt], n_tokens, seed=step))
    yield SampleReport(step=step, prompt=prompt, text=text)


def generate_texts(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[bytes], n_tokens: int, *, seed: int
) -> Generator[int, None, list[bytes]]:
    """Return a continuation of each prompt, and yield the tokens so far; all prompts must be
    equal."""
    ids = tokenizer.encode_prompt(prompts[0])[-model.config.context_length :]
    if not ids:  # an empty prompt and a tokenizer without an end-of-text token
        return [b"" for _ in prompts]
    stop = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    prompt_ids = [ids for _ in prompts]
    return (yield from _generate(model, tokenizer, prompt_ids, n_tokens, stop=stop, seed=seed))


def _generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    *,
    stop: Sequence[int],
    seed: int,
) -> Generator[int, None, list[bytes]]:
    """Return a continuation of each prompt, and yield the number of tokens so far."""
    texts: list[list[int]] = [[] for _ in prompts]
    sampling = SamplingConfig(max_new_tokens=n_tokens, seed=seed)
    tokens = generate(TorchEngine(model), prompts, stop=stop, sampling=sampling)
    for n_done, token in enumerate(tokens, 1):
        texts[token.sequence].append(token.id)
        yield n_done
    return [tokenizer.decode(text, continuation=True) for text in texts]
