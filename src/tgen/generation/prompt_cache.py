"""Prompt caches in memory: extract keys and values from an engine for later requests.

`tgen.checkpoint.prompt_cache` reads and writes the files.
"""

from collections.abc import Sequence

from tgen.engine.base import Engine, PromptCache
from tgen.errors import UsageError
from tgen.generation.loop import restore_prefix


def extract_prompt_cache(engine: Engine, tokens: Sequence[int]) -> PromptCache | None:
    """Return the keys and values of a text that the engine has just generated as its only sequence,
    or None if the window has slid."""
    n = engine.lengths[0]
    if len(tokens) > engine.context_length or not n:
        return None
    n = min(n, len(tokens) - 1)
    keys, values = engine.keys_and_values()
    return PromptCache(list(tokens[:n]), keys[:, :, :n], values[:, :, :n])


def compute_prompt_cache(
    engine: Engine, prompt: Sequence[int], known: PromptCache | None
) -> PromptCache:
    """Compute the keys and values of a prompt, reusing its prefix in `known`.

    Raises UsageError if the prompt is longer than the context, since its window would slide.
    """
    if len(prompt) > engine.context_length:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens cannot be cached "
            f"(context length {engine.context_length})",
            "shorten the prompt",
        )
    n = restore_prefix(engine, prompt, known)
    if len(prompt) > n:
        engine.extend([prompt[n:]])
    return PromptCache(list(prompt), *engine.keys_and_values())
