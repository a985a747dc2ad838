"""`tgen serve`: OpenAI's HTTP API in front of one engine."""
