"""Versions: which are loaded, when they swap, and what is left when loading fails. No SavedModel is loaded here."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from pipeline import manifest
from pipeline.serving import models, source, status
from pipeline.serving.models import AVAILABLE, END, LOADING, UNLOADING, Models
from pipeline.serving.source import Policy, Source
from pipeline.serving.status import ServingError


class Servable:
    """What a loader gives; it knows whether it was closed."""

    def __init__(self, name, number):
        self.name, self.number, self.closed = name, number, False

    def close(self):
        self.closed = True


class Loader:
    """Loads by name and number; versions in `bad` fail, and `gate` holds those in `held` until it is set."""

    def __init__(self):
        self.bad, self.attempts, self.loaded = set(), [], []

    def __call__(self, origin, number):
        self.attempts.append(number)
        if number in self.bad:
            raise ServingError(status.DATA_LOSS, f"version {number} is damaged")
        servables = {name: Servable(name, number) for name in origin.names}
        self.loaded += servables.values()
        return servables


def make(folder: Path, *numbers) -> Path:
    for number in numbers:
        (folder / str(number)).mkdir(parents=True)
    return folder


def plain(folder: Path, name="m", **options) -> Source:
    return Source(((name, folder),), **options)


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited in vain")


def states(served, name="m"):
    return {version.number: version.state for version in served.list_versions(name)}


def test_folders_are_versions_when_their_names_are_numbers(tmp_path):
    make(tmp_path / "m", 1, "007", 10, "v2", "3.5", "-4", ".tmp-5", "٣", 2**63)
    (tmp_path / "m" / "11").write_text("a file")
    found = plain(tmp_path / "m")
    assert found.list_versions() == [1, 7, 10] and found.path("m", 7).name == "007"
    assert (
        plain(tmp_path / "none").list_versions() is None and plain(make(tmp_path / "empty", "x")).list_versions() == []
    )


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        (Policy(), [5]),
        (Policy(latest=2), [5, 3]),
        (Policy(latest=None), [5, 3, 1]),
        (Policy(specific=(1, 4)), [1]),
        (Policy(specific=(3, 1)), [3, 1]),
    ],
)
def test_policies(policy, chosen):
    assert policy.choose([1, 3, 5]) == chosen


def test_a_new_version_takes_over_without_a_gap(tmp_path):
    """The old one answers until the new one does, and is closed when its last request is done."""

    async def main():
        load, base = Loader(), make(tmp_path / "m", 1)
        served = Models(load, 0, 0)
        await served.configure([plain(base)])
        assert served.find("m").number == 1 and states(served) == {1: AVAILABLE}
        with served.find("m").lease() as first:
            make(base, 2)
            await served.poll()
            assert served.find("m").number == 1
            await until(lambda: states(served) == {1: UNLOADING, 2: AVAILABLE})
            assert served.find("m").number == 2 and not first.closed
            with pytest.raises(ServingError, match=r"Servable not found for request: Specific\(m, 1\)"):
                served.find("m", 1)
        await until(lambda: states(served) == {1: END, 2: AVAILABLE})
        assert first.closed and load.attempts == [1, 2]

    asyncio.run(main())


def test_a_bad_version_leaves_the_old_one(tmp_path):
    """It is tried as often as asked, its error is told, and what repairs it is a version with another number."""

    async def main():
        load, base = Loader(), make(tmp_path / "m", 1)
        served = Models(load, 2, 0.001)
        await served.configure([plain(base)])
        load.bad = {2}
        make(base, 2)
        await served.poll()
        await until(lambda: states(served) == {1: AVAILABLE, 2: END})
        for _ in range(3):
            await served.poll()
        [bad, good] = served.list_versions("m")
        assert load.attempts == [1, 2, 2, 2] and (bad.error.code, good.error) == (status.DATA_LOSS, None)
        assert served.find("m").number == 1
        make(base, 3)
        await served.poll()
        await until(lambda: states(served) == {1: END, 2: END, 3: AVAILABLE})

    asyncio.run(main())


def test_a_version_that_recovers_while_it_is_retried(tmp_path):
    async def main():
        load = Loader()
        load.bad = {1}
        served = Models(load, 50, 0.01)
        with pytest.raises(ServingError, match="version 1 is damaged"):
            await served.configure([plain(make(tmp_path / "m", 1))])
        assert states(served) == {1: LOADING}
        load.bad = set()
        await until(lambda: states(served) == {1: AVAILABLE})
        assert served.find("m").error is None

    asyncio.run(main())


def test_versions_that_go_are_unloaded_and_may_come_back(tmp_path):
    async def main():
        load, base = Loader(), make(tmp_path / "m", 1, 2)
        served = Models(load, 0, 0)
        await served.configure([plain(base, policy=Policy(latest=2))])
        await until(lambda: states(served) == {1: AVAILABLE, 2: AVAILABLE})
        shutil.rmtree(base / "2")
        await served.poll()
        await until(lambda: states(served) == {1: AVAILABLE, 2: END})
        make(base, 2)
        await served.poll()
        await until(lambda: states(served) == {1: AVAILABLE, 2: AVAILABLE})
        (base).rename(tmp_path / "away")  # a disk that cannot be read says nothing
        await served.poll()
        assert states(served) == {1: AVAILABLE, 2: AVAILABLE}

    asyncio.run(main())


def test_labels(tmp_path):
    async def main():
        base = make(tmp_path / "m", 1, 2)
        served = Models(Loader(), 0, 0)
        labels = (("m", "stable", 1), ("m", "canary", 2))
        await served.configure([plain(base, policy=Policy(latest=2), labels=labels)])
        assert served.find("m", label="stable").number == 1 and served.find("m", label="canary").number == 2
        with pytest.raises(ServingError, match="Unrecognized servable version label: old"):
            served.find("m", label="old")
        wrong = plain(base, policy=Policy(latest=2), labels=(("m", "next", 3),))
        with pytest.raises(ServingError, match="label next of m is of version 3, which is not available"):
            await served.configure([wrong])
        await served.configure([wrong], unavailable_labels=True)
        with pytest.raises(ServingError, match="Servable not found"):
            served.find("m", label="next")

    asyncio.run(main())


def test_another_configuration(tmp_path):
    """What stays is not loaded again, what goes is closed, what comes is there when the call returns."""

    async def main():
        load = Loader()
        served = Models(load, 0, 0)
        a, b, c = (plain(make(tmp_path / name, 1), name) for name in "abc")
        await served.configure([a, b])
        await served.configure([b, c])
        assert served.names() == {"b", "c"} and len(load.attempts) == 3 and served.find("c").number == 1
        await until(lambda: [s.closed for s in load.loaded] == [True, False, False])
        with pytest.raises(ServingError, match="Servable not found"):
            served.find("a")
        with pytest.raises(ServingError, match="model b is configured more than once"):
            await served.configure([b, b])
        assert served.names() == {"b", "c"}

    asyncio.run(main())


def copy_version(export: Path, number: int) -> None:
    """A further version of an export: the same files under another number."""
    body = json.loads((export / "manifests" / "1.json").read_text())
    body["version"], body["export_id"] = number, f"copy{number}"
    body["files"] = {renamed(name, number): digest for name, digest in body["files"].items()}
    del body["sha256"]
    for part in body["signatures"]:
        shutil.copytree(export / part / "1", export / part / str(number))
    copied = manifest._build(manifest.Manifest, body, "")
    (export / "manifests" / f"{number}.json").write_text(manifest.dumps(copied))


def renamed(name: str, number: int) -> str:
    part, _, rest = name.partition("/1/")
    return f"{part}/{number}/{rest}" if rest else name


def test_parts_of_an_export_swap_together(tiny_export, tmp_path):
    """At no moment do two parts answer with different versions, and folders without a manifest are not versions."""

    async def main():
        export = Path(shutil.copytree(tiny_export, tmp_path / "tiny"))
        load = Loader()
        served = Models(load, 0, 0)
        await served.configure([source.from_export(export, Policy())])
        assert served.names() == {"text_encoder", "diffusion_model", "decoder"}
        make(export / "decoder", 3)
        copy_version(export, 2)
        assert manifest.read(export).version == 2
        await served.poll()
        seen = set()
        for _ in range(200):
            seen.add(tuple(served.find(name).number for name in sorted(served.names())))
            await asyncio.sleep(0.0005)
        assert seen <= {(1, 1, 1), (2, 2, 2)} and (2, 2, 2) in seen and load.attempts == [1, 2]
        load.bad = {4}
        copy_version(export, 4)
        await served.poll()
        await until(lambda: states(served, "decoder").get(4) == END)
        assert {served.find(name).number for name in served.names()} == {2}
        assert models.END == states(served, "text_encoder")[4]

    asyncio.run(main())
