"""Which versions of which models are served: found on disk, loaded beside the old ones, swapped without a gap."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pipeline.serving import status
from pipeline.serving.source import Source
from pipeline.serving.status import ServingError

# States of a version, as numbered in TF Serving's protocol.
START, LOADING, AVAILABLE, UNLOADING, END = 10, 20, 30, 40, 50

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Version:
    """One version of one model; `servable` is there while it is available."""

    model: str
    number: int
    state: int = START
    error: ServingError | None = None  # of the last attempt to load
    servable: object = None
    users: int = 0
    idle: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def lease(self):
        """Keep it loaded for as long as a request needs it."""
        self.users += 1
        try:
            yield self.servable
        finally:
            self.users -= 1
            if not self.users:
                self.idle.set()


@dataclasses.dataclass
class Group:
    """Models whose versions change together: the parts of an export, or one model alone."""

    source: Source
    wanted: frozenset[int] = frozenset()
    versions: dict[int, dict[str, Version]] = dataclasses.field(default_factory=dict)  # number -> model -> Version
    removed: bool = False  # from the configuration

    def available(self) -> set[int]:
        """Versions all of whose models can answer."""
        return {n for n, parts in self.versions.items() if all(v.state == AVAILABLE for v in parts.values())}


class Models:
    """The served models. Lives on one event loop; loading happens in a thread."""

    def __init__(self, load: Callable[[Source, int], dict[str, object]], retries: int, retry_seconds: float):
        """`load` (in a thread) gives the servables of one version, by model; it raises ServingError."""
        self._load, self._retries, self._retry_seconds = load, retries, retry_seconds
        self._groups: list[Group] = []
        self._tasks: set[asyncio.Task] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._changed = asyncio.Event()

    async def configure(self, sources: list[Source], wait: bool = True, unavailable_labels: bool = False) -> None:
        """Serve exactly these from now on.

        Args:
            wait: until their versions answer or have failed. unavailable_labels: let labels name versions that do not.

        Raises:
            ServingError: a name twice, a label of a version that is not there, or (`wait`) a model without
                a version that answers.
        """
        names = [name for source in sources for name in source.names]
        if len(set(names)) < len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ServingError(status.INVALID_ARGUMENT, f"model {', '.join(twice)} is configured more than once")
        kept = {g.source.base_paths: g for g in self._groups if not g.removed}
        for group in self._groups:
            group.removed = True
        for source in sources:
            group = kept.get(source.base_paths)
            if group is None:
                self._groups.append(group := Group(source))
            group.source, group.removed = source, False
        await self.poll()
        if wait:
            await self._wait_for(sources)
        if not unavailable_labels:
            for source in sources:
                for name, label, number in source.labels:
                    if not self._is_available(name, number):
                        text = f"label {label} of {name} is of version {number}, which is not available"
                        raise ServingError(status.FAILED_PRECONDITION, text)

    async def poll(self) -> None:
        """Look at the disk once, and start to load and unload what has come and gone."""
        for group in self._groups:
            found = [] if group.removed else await asyncio.to_thread(group.source.list_versions)
            if found is None:
                continue  # the disk could not be read: what is served stays
            before, group.wanted = group.wanted, frozenset(group.source.policy.choose(found))
            if not group.wanted and not group.removed:
                log.warning("no versions of %s under %s", "/".join(group.source.names), group.source.where)
            for number in sorted(group.wanted, reverse=True):
                parts = group.versions.get(number)
                if parts is None or all(
                    v.state == END and (v.error is None or number not in before) for v in parts.values()
                ):
                    group.versions[number] = {name: Version(name, number) for name in group.source.names}
                    self._start(self._load_version(group, number))
            self._retire(group)

    async def watch(self, seconds: float) -> None:
        """Poll for ever."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.poll()
            except Exception:
                log.exception("looking for versions failed")

    def find(self, name: str, number: int | None = None, label: str | None = None) -> Version:
        """The version that answers a request; without number and label the newest.

        Raises:
            ServingError: NOT_FOUND, or INVALID_ARGUMENT for a label that is not configured.
        """
        groups = [g for g in self._groups if not g.removed and name in g.source.names]
        if label and groups:
            labels = {lab: n for model, lab, n in groups[0].source.labels if model == name}
            if label not in labels:
                raise ServingError(status.INVALID_ARGUMENT, f"Unrecognized servable version label: {label}")
            number = labels[label]
        for group in groups:
            numbers = group.available() & ({number} if number is not None else group.available())
            if numbers:
                return group.versions[max(numbers)][name]
        wanted = f"Latest({name})" if number is None else f"Specific({name}, {number})"
        raise ServingError(status.NOT_FOUND, f"Servable not found for request: {wanted}")

    def list_versions(self, name: str) -> list[Version]:
        """Every version of a model that was ever seen, newest first."""
        found = [parts[name] for g in self._groups for parts in g.versions.values() if name in parts]
        return sorted(found, key=lambda version: -version.number)

    def names(self) -> set[str]:
        """Of the models that are configured."""
        return {name for group in self._groups if not group.removed for name in group.source.names}

    def available(self) -> list[Version]:
        """Everything that can answer."""
        return [v for g in self._groups for n in g.available() for v in g.versions[n].values()]

    def loading(self) -> int:
        """How many versions are being loaded."""
        return sum(v.state == LOADING for g in self._groups for parts in g.versions.values() for v in parts.values())

    def _is_available(self, name: str, number: int) -> bool:
        return any(v.number == number and v.state == AVAILABLE for v in self.list_versions(name))

    async def _wait_for(self, sources: list[Source]) -> None:
        """Until every wanted version answers or has failed once; raises where none of a group answers."""
        for group in [g for g in self._groups if g.source in sources and not g.removed]:
            while not group.wanted or not all(
                version.state == AVAILABLE or version.error
                for number in group.wanted
                for version in group.versions[number].values()
            ):
                self._changed.clear()
                await self._changed.wait()
            if not group.available():
                failed = group.versions[max(group.wanted)].values()
                raise next(version.error for version in failed if version.error)

    async def _load_version(self, group: Group, number: int) -> None:
        parts = group.versions[number]
        servables = await self._try_to_load(group, number)
        for name, version in parts.items():  # without a pause: models of a group swap together
            version.servable = servables and servables[name]
            version.state = AVAILABLE if servables else END
        log.info("version %d of %s is %s", number, "/".join(parts), "available" if servables else "not served")
        self._changed.set()
        self._retire(group)

    async def _try_to_load(self, group: Group, number: int) -> dict | None:
        versions = list(group.versions[number].values())
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(self._retry_seconds)
            if number not in group.wanted:
                return None
            for version in versions:
                version.state = LOADING
            try:
                loop = asyncio.get_running_loop()
                servables = await loop.run_in_executor(self._thread, self._load, group.source, number)
            except Exception as error:
                failure = error if isinstance(error, ServingError) else ServingError(status.INTERNAL, str(error))
                log.warning("version %d of %s: %s", number, "/".join(group.source.names), failure)
                for version in versions:
                    version.error = failure
                self._changed.set()
            else:
                for version in versions:
                    version.error = None
                return servables
        return None

    def _retire(self, group: Group) -> None:
        """Unload what is not wanted any more, but never the last that answers while its successor does not."""
        available = group.available()
        if group.wanted and not group.wanted & available:
            return
        for number in available - group.wanted:
            versions = list(group.versions[number].values())
            for version in versions:
                version.state = UNLOADING
            self._start(self._unload(versions))

    async def _unload(self, versions: list[Version]) -> None:
        for version in versions:
            while version.users:
                version.idle.clear()
                await version.idle.wait()
            servable, version.servable = version.servable, None
            await asyncio.get_running_loop().run_in_executor(self._thread, servable.close)
            version.state = END
        log.info("version %d of %s is unloaded", versions[0].number, "/".join(v.model for v in versions))

    def _start(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
