"""All formats by name."""

from fuzz.formats.archives import Archives
from fuzz.formats.chat import Chat
from fuzz.formats.config import Config
from fuzz.formats.constraints import Constraints
from fuzz.formats.corpus import CorpusFile
from fuzz.formats.documents import Documents
from fuzz.formats.generation_config import GenerationConfig
from fuzz.formats.gguf import Gguf, SplitGguf
from fuzz.formats.older_tokenizer import OlderTokenizer
from fuzz.formats.prompt import Prompt
from fuzz.formats.prompt_cache import Cache
from fuzz.formats.requests import Requests
from fuzz.formats.rows import Rows
from fuzz.formats.safetensors import Safetensors
from fuzz.formats.shapes import Shapes
from fuzz.formats.states import States
from fuzz.formats.tables import Tables
from fuzz.formats.tokenizer import TokenizerJson
from fuzz.formats.torch_file import TorchFile
from fuzz.runner import MakeFormat

FORMATS: dict[str, MakeFormat] = {
    "config": Config,
    "generation_config": GenerationConfig,
    "tokenizer": TokenizerJson,
    "safetensors": Safetensors,
    "gguf": Gguf,
    "split_gguf": SplitGguf,
    "torch_file": TorchFile,
    "older_tokenizer": OlderTokenizer,
    "chat": Chat,
    "prompt_cache": Cache,
    "shapes": Shapes,
    "states": States,
    "rows": Rows,
    "prompt": Prompt,
    "constraints": Constraints,
    "corpus": CorpusFile,
    "tables": Tables,
    "documents": Documents,
    "archives": Archives,
    "requests": Requests,
}
WEIGHTS = {  # shares of the cases: fewer of what takes longer
    "config": 16,
    "generation_config": 3,
    "tokenizer": 16,
    "safetensors": 16,
    "gguf": 16,
    "split_gguf": 2,
    "torch_file": 8,
    "older_tokenizer": 8,
    "chat": 2,
    "prompt_cache": 10,
    "shapes": 1,
    "states": 1,
    "rows": 5,
    "prompt": 1,
    "constraints": 6,
    "corpus": 8,
    "tables": 8,
    "documents": 8,
    "archives": 8,
    "requests": 8,
}
