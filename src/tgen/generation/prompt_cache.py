"""Keys and values of a text, taken out of an engine so that they need not be computed again."""

from collections.abc import Sequence

from tgen.engine.base import Engine, PromptCache
from tgen.errors import UsageError
from tgen.generation.loop import begin_with


def kept(engine: Engine, text: Sequence[int]) -> PromptCache | None:
    """What the engine still holds of a text, ids, that it has just gone through alone; None where
    the text has slid."""
    n = engine.lengths[0]
    if len(text) > engine.context_length or not n:
        return None
    n = min(n, len(text) - 1)
    keys, values = engine.keys_and_values()
    return PromptCache(list(text[:n]), keys[:, :, :n], values[:, :, :n])


def compute_prompt_cache(
    engine: Engine, prompt: Sequence[int], known: PromptCache | None
) -> PromptCache:
    """Those of a prompt, ids; its beginning is taken from `known` if it is there.

    Raises UsageError where the prompt is longer than the context: it would slide.
    """
    if len(prompt) > engine.context_length:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens cannot be kept",
            f"give at most {engine.context_length}, the model's context",
        )
    n = begin_with(engine, prompt, known)
    if len(prompt) > n:
        engine.extend([prompt[n:]])
    return PromptCache(list(prompt), *engine.keys_and_values())
