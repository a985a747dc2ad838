"""`tgen generate --chat`: the prompt is what a user says, and the model answers."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from tgen.cli import console
from tgen.cli.generate.interactive import print_help, read_line, write_turn
from tgen.config import Draft, SamplingConfig
from tgen.errors import UsageError

if TYPE_CHECKING:
    from tgen.api import Model
    from tgen.chat.sandbox import Message
    from tgen.engine.base import PromptCache


def initial_messages(model: "Model", system: str | None) -> "list[Message]":
    """What stands before the first prompt. Raises ModelError if the model has no chat template."""
    _ = model.chat_format  # it raises what is to be said before all else
    return [] if system is None else [message("system", os.fsencode(system))]


def message(role: str, content: bytes) -> "Message":
    """One turn of a conversation."""
    return {"role": role, "content": content.decode("utf-8", "surrogateescape")}


def chat_loop(
    model: "Model",
    sampling: SamplingConfig,
    text: bytes,
    *,
    opening: "list[Message]",
    kv_cache: bool,
    draft: Draft,
) -> None:
    """As `interactive.converse`: each line and each answer is a turn of one conversation."""
    from tgen.generation.loop import in_turn
    from tgen.generation.sampling import row_seed

    print_help("Ctrl-C stops an answer, Ctrl-D ends")
    said, n_turns = list(opening), 0
    cache: PromptCache | None = None
    while (line := text if text and not n_turns else read_line()) is not None:
        if not line:
            continue
        config = replace(sampling, seed=row_seed(sampling.seed, n_turns))
        n_turns += 1
        said.append(message("user", line))
        try:
            request = model.chat_request(said, config)
            tokens = model.rows(
                in_turn([request]),
                n_rows=1,
                kv_cache=kv_cache,
                draft=draft,
                prompt_cache=cache,
            )
            turn = write_turn(model, request.prompt, tokens)
            said.append(message("assistant", turn.said))
            cache = turn.cache
        except UsageError as error:  # for example --overflow stop, and the context is full
            console.print_status(f"error: {error.message}")
            console.print_status("a new conversation begins")
            said, cache = list(opening), None
