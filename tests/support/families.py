"""The families that most tests run on: all whose layers differ in kind."""

from tgen.config import FAMILIES

# Others combine what these have: test_more_families.py compares each with transformers once.
COMBINED = {
    "gemma", "olmo", "olmo3", "phi", "gptj", "opt", "gpt_bigcode", "stablelm", "cohere", "cohere2",
    "glm4", "ministral3", "arcee", "seed_oss", "hunyuan", "exaone4",
}  # fmt: skip
DISTINCT = [family for family in FAMILIES if family not in COMBINED]
