"""Options of `tgen generate` that contradict each other."""

from typing import Any

from tgen.errors import UsageError


def check_together(given: dict[str, Any]) -> None:
    """Raises UsageError for options that contradict each other."""
    rows, prompt = given["input_"] is not None, given["prompt"] is not None
    several = rows or given["samples"] > 1
    as_json = given["json_output"] or given["jsonl"]
    caches = given["save_cache"] or given["load_cache"]
    silenced = given["stats"] and given["quiet"] and not as_json
    clashes = {
        "--stats goes where --quiet is silent": silenced,
        "--no-kv-cache does not go with a prompt cache": given["no_kv_cache"] and caches,
        "--input does not go with a prompt cache": rows and caches,
        "--input does not go with --prompt": rows and prompt,
        "--system is what a --chat begins with": given["system"] is not None and not given["chat"],
        "--chat does not go with --echo": given["chat"] and given["echo"],
        "--chat does not go with a prompt cache": given["chat"] and caches,
        "--json does not go with --jsonl": given["json_output"] and given["jsonl"],
        "--interactive writes one text after another, as text": given["interactive"]
        and (several or as_json or caches or given["echo"] or given["stats"]),
    }
    for message, clash in clashes.items():
        if clash:
            raise UsageError(message, "leave one of them away")
    if given["json_output"] and several:
        raise UsageError("--json writes one object, and there may be more", "give --jsonl")
    for name in ("logprobs", "explain"):
        if given[name] and not as_json:
            raise UsageError(f"--{name} is told in JSON", "add --json")
