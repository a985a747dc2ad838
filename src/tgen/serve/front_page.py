"""The text at / for clients other than browsers: what the server has."""

from collections.abc import Sequence

_PAGE = """\
tgen serves {names}.

  curl {root}v1/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "prompt": "What is", "max_tokens": 20}}'

OpenAI's API, for clients with the base URL {root}v1
  POST /v1/completions, /v1/chat/completions, /v1/responses
  GET  /v1/models
Ollama's API, for clients with the address {root}
  POST /api/generate, /api/chat, /api/show
  GET  /api/tags, /api/ps, /api/version
llama.cpp's API
  POST /tokenize, /detokenize, /apply-template
  GET  /props
For operators
  GET  /health, /metrics
"""


def render(root: str, names: Sequence[str]) -> str:
    """Return the page for a server with the address `root`, which ends with a slash, and the names
    of its models."""
    return _PAGE.format(root=root, name=names[0], names=", ".join(names))
