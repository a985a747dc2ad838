"""`tgen generate --chat`: the prompt is a user message, and the model answers."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.generate.interactive import read_line, write_turn
from tgen.config import SamplingConfig
from tgen.errors import UsageError

if TYPE_CHECKING:
    from tgen.chat.render_process import Message
    from tgen.engine.base import PromptCache
    from tgen.loaded_model import LoadedModel


def initial_messages(model: "LoadedModel", system: str | None) -> "list[Message]":
    """Return the messages before the first prompt.

    Raises ModelError if the model has no chat template.
    """
    _ = model.chat_format  # raises here, before anything else is reported
    return [] if system is None else [message("system", os.fsencode(system))]


def message(role: str, content: bytes) -> "Message":
    """Return one message of a conversation."""
    return {"role": role, "content": content.decode("utf-8", "surrogateescape")}


def chat_loop(
    model: "LoadedModel",
    sampling: SamplingConfig,
    prompt: bytes,
    *,
    messages: "list[Message]",
    **how: Any,
) -> None:
    """Read lines as in `interactive.repl`; each line and each answer is a message."""
    from tgen.generation.loop import make_source
    from tgen.generation.random_numbers import row_seed

    console.print_status("Ctrl-C stops an answer, Ctrl-D ends the chat")
    conversation, n_turns = list(messages), 0
    cache: PromptCache | None = None
    while (line := prompt if prompt and not n_turns else read_line()) is not None:
        if not line:
            continue
        config = replace(sampling, seed=row_seed(sampling.seed, n_turns))
        n_turns += 1
        conversation.append(message("user", line))
        try:
            request = model.chat_request(conversation, config)
            source = make_source([request])
            tokens = model.complete(source, batch_size=1, prompt_cache=cache, **how)
            turn = write_turn(model, request.prompt, tokens)
            conversation.append(message("assistant", turn.text))
            cache = turn.cache
        except UsageError as error:  # for example --overflow stop with a full context
            console.print_status(f"error: {error.message}")
            console.print_status("starting a new conversation")
            conversation, cache = list(messages), None
