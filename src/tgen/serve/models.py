"""The served models: their names, loading at the first use, and unloading by memory.

A model with an adapter shares the weights of its base that the adapter does not change.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tgen.checkpoint.model_dir import describe, digest
from tgen.checkpoint.model_files import adapter_files, model_files
from tgen.engine.cpu import target
from tgen.errors import ModelError, TgenError
from tgen.loaded_model import LoadedModel
from tgen.machine.daemon_thread import in_daemon_thread
from tgen.serve.engine_thread import EngineThread
from tgen.serve.grammar_check import GrammarCheck
from tgen.serve.http_error import HttpError, internal_error, model_not_found, unavailable
from tgen.version import __version__

_POLL_SECONDS = 0.05
_JOIN_SECONDS = 60.0  # for a pass whose texts were canceled
_log = logging.getLogger("tgen.serve")


def tagged(name: str) -> str:
    """Return a model's name as Ollama has it, which appends a tag to a name without one."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that is served, loaded or not."""

    name: str  # in the API
    path: Path
    adapter: Path | None
    base: str | None  # name of the served model that the adapter changes
    context_length: int
    n_bytes: int  # of its files


def describe_source(name: str, path: Path, adapter: Path | None, base: str | None) -> ModelSource:
    """Return a source without loading the weights; raises ModelError for a damaged model."""
    files = [*model_files(path), *(adapter_files(adapter) if adapter else ())]
    return ModelSource(
        name=name,
        path=path,
        adapter=adapter,
        base=base,
        context_length=describe(path)[0].context_length,
        n_bytes=sum(file.stat().st_size for file in files),
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Limits of each model's generation, and the memory of all."""

    batch_size: int
    queue_size: int  # texts
    grammar_seconds: float = 2.0  # of CPU time, to compile a constraint
    memory_bytes: int | None = None  # for the weights of all models; one is always loaded


class ServedModel:
    """A model in memory, with the thread that generates its texts."""

    def __init__(
        self,
        source: ModelSource,
        model: LoadedModel,
        fingerprint: str,
        settings: ModelSettings,
        on_failure: Callable[[], None],
    ) -> None:
        self.source, self.model, self.fingerprint = source, model, fingerprint
        self.engine = EngineThread(
            model,
            batch_size=settings.batch_size,
            queue_size=settings.queue_size,
            on_failure=on_failure,
        )
        self.grammars = GrammarCheck(model.vocabulary, settings.grammar_seconds)

    @property
    def n_texts(self) -> int:
        """Number of texts in the batch and in the queue."""
        return self.engine.n_running + self.engine.n_waiting

    def stop(self) -> None:
        """End its texts, its thread and its process."""
        self.engine.stop()
        self.grammars.close()


class Visit(NamedTuple):
    """A request that needs a model. `ready` is done when the model is loaded, or has the HttpError
    if it cannot be; the model stays loaded until the visit ends."""

    name: str
    ready: asyncio.Future[None]


class ServedModels:
    """All models by name; used by one event loop, which is running."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        load: Callable[[ModelSource], LoadedModel],
        settings: ModelSettings,
        *,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_failure` is called when an engine fails."""
        self.sources = {source.name: source for source in sources}
        self.default = sources[0].name  # for requests that name none
        self.queue_size = settings.queue_size
        self._load, self._settings, self._on_failure = load, settings, on_failure
        self._loaded: dict[str, ServedModel] = {}  # the most recently used last
        self._n_bytes = {source.name: source.n_bytes for source in sources}
        self._visits: list[Visit] = []  # in the order of their arrival
        self._loader: asyncio.Task[None] | None = None  # loads for the visits that wait
        self._lacks_room = False  # it waits for texts to end
        self._draining = False

    @property
    def loaded(self) -> list[ServedModel]:
        """The models in memory, the least recently used first."""
        return list(self._loaded.values())

    @property
    def failed(self) -> bool:
        """Whether an engine has failed."""
        return any(served.engine.failed for served in self.loaded)

    @property
    def n_running(self) -> int:
        """Number of texts in the batches."""
        return sum(served.engine.n_running for served in self.loaded)

    @property
    def n_waiting(self) -> int:
        """Number of texts in the queues."""
        return sum(served.engine.n_waiting for served in self.loaded)

    def check_open(self) -> None:
        """Raise HttpError if no new texts are accepted."""
        for served in self.loaded:
            served.engine.check_open()
        if self._draining:
            raise unavailable("the server is shutting down", "shutting_down")

    def find(self, name: str) -> ModelSource:
        """Return the model of a name, with or without Ollama's tag; raises HttpError."""
        by_tag = {tagged(known): source for known, source in self.sources.items()}
        source = self.sources.get(name) or by_tag.get(tagged(name))
        if source is not None:
            return source
        raise model_not_found(name, list(self.sources))

    @contextmanager
    def visit(self, name: str) -> Iterator[Visit]:
        """Keep a model in memory, once it is loaded, until the end of the block.

        Raises HttpError for an unknown name. While another model waits for room, the visit waits
        for its turn, so that no model keeps others out for long.
        """
        name = self.find(name).name
        visit = Visit(name, asyncio.get_running_loop().create_future())
        self._visits.append(visit)
        if name in self._loaded and not self._lacks_room:
            visit.ready.set_result(None)
        elif self._loader is None or self._loader.done():
            self._loader = asyncio.create_task(self._load_wanted())
        try:
            yield visit
        finally:
            self._visits.remove(visit)

    def get(self, name: str) -> ServedModel:
        """Return a loaded model. After its visit, it stays loaded until the next await, and while
        it has texts."""
        for used in (name, self.sources[name].base):
            if used in self._loaded:
                self._loaded[used] = self._loaded.pop(used)
        return self._loaded[name]

    def add(self, name: str, model: LoadedModel, fingerprint: str) -> None:
        """Start to serve a loaded model."""
        self._n_bytes[name] = model.engine.weight_bytes
        self._loaded[name] = ServedModel(
            self.sources[name], model, fingerprint, self._settings, self._on_failure
        )
        if self._draining:
            self._loaded[name].stop()

    def drain(self) -> None:
        """Accept no more texts, and drop those that have not started."""
        self._draining = True
        for served in self.loaded:
            served.engine.drain()

    def stop(self) -> None:
        """End all texts and threads."""
        self._draining = True
        for served in self.loaded:
            served.stop()
        if self._loader is not None:
            self._loader.cancel()

    def join(self, seconds: float) -> None:
        """Wait until the threads have ended, `seconds` for each at most."""
        for served in self.loaded:
            served.engine.join(seconds)

    async def _load_wanted(self) -> None:
        """Load the models that visits wait for, in their order."""
        while waiting := [visit for visit in self._visits if not visit.ready.done()]:
            name, base = waiting[0].name, self.sources[waiting[0].name].base
            error: HttpError | None = None
            try:
                for one in filter(None, (base, name)):
                    if one not in self._loaded and await self._make_room(one, base, name):
                        await self._load_in_thread(self.sources[one])
            except HttpError as failure:
                error = failure
            except Exception:  # the loader must go on, or all visits would wait for ever
                _log.exception("the model %s cannot be served", name)
                error = internal_error()
            for visit in self._visits:
                if visit.name != name or visit.ready.done():
                    continue
                if error:
                    visit.ready.set_exception(error)
                elif name in self._loaded:
                    visit.ready.set_result(None)

    async def _make_room(self, name: str, base: str | None, wanted: str) -> bool:
        """Unload models until the memory has room for this one, or only the base is left; those
        that generate finish first. Return False if nobody waits for the wanted model any more."""
        limit = self._settings.memory_bytes
        try:
            while any(visit.name == wanted and not visit.ready.done() for visit in self._visits):
                n_bytes = sum(self._n_bytes[one] for one in (name, *self._loaded))
                bases = {served.source.base for served in self.loaded} | {base}
                others = [served for served in self.loaded if served.source.name not in bases]
                if limit is None or n_bytes <= limit or not others:
                    return True
                visited = {visit.name for visit in self._visits if visit.ready.done()}
                idle = (one for one in others if not one.n_texts and one.source.name not in visited)
                if (unused := next(idle, None)) is None:
                    self._lacks_room = True
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                del self._loaded[unused.source.name], others
                unused.stop()
                await _run(unused.engine.join, _JOIN_SECONDS)
            return False
        finally:
            self._lacks_room = False

    async def _load_in_thread(self, source: ModelSource) -> None:
        base = self._loaded.get(source.base or "")
        try:
            loaded = await _run(self._load_now, source, base.model if base else None)
        except Exception as error:
            if isinstance(error, TgenError):  # it may name paths
                _log.error("the model %s cannot be loaded: %s", source.name, error)
            else:
                _log.exception("the model %s cannot be loaded", source.name)
            message = f"the model {source.name!r} cannot be loaded; the server's log says why"
            raise unavailable(message, "model_not_loaded") from None
        self.add(source.name, *loaded)

    def _load_now(self, source: ModelSource, base: LoadedModel | None) -> tuple[LoadedModel, str]:
        model = self._load(source)
        if base is not None:
            model.engine.share_weights(base.engine)
        return model, warm_up(model)


async def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of its own, for which the end of the process does not wait."""
    return await asyncio.wrap_future(in_daemon_thread(partial(function, *arguments), name="models"))


def warm_up(model: LoadedModel) -> str:
    """Compute what the first request would otherwise wait for. Returns the fingerprint, a name for
    everything that a text depends on besides the request."""
    _ = model.vocabulary, model.ngrams, model.defaults
    with suppress(ModelError):  # without a template, only chats are errors
        _ = model.chat_format
    engine = model.engine
    computed = engine.name, engine.dtype, engine.cache_dtype, target.description()
    facts = digest(model.bundle), __version__, *computed
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
