import asyncio
import threading
import time

import pytest

from pipeline.serving import status
from pipeline.serving.admission import Admission
from pipeline.serving.status import ServingError


async def enter(admission, work, deadline=None):
    with admission.place() as run:
        return await run(work, deadline)


def outcomes(results):
    return [r.code if isinstance(r, ServingError) else type(r) if isinstance(r, BaseException) else r for r in results]


async def settle(condition):
    """Until what other tasks do has happened."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited in vain")


def test_a_full_queue_refuses_exactly_the_rest():
    """200 at once, one runs and eight wait: nine answers, in the order they came, and 191 that say when to return."""

    async def main():
        admission, gate, order = Admission(1, 8), threading.Event(), []

        def work(i):
            return lambda seconds: (gate.wait(20), order.append(i), i)[2]

        tasks = [asyncio.ensure_future(enter(admission, work(i))) for i in range(200)]
        await settle(lambda: admission.rejected == 191)
        assert (admission.running, admission.queued) == (1, 8)
        gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert outcomes(results) == [*range(9), *[status.RESOURCE_EXHAUSTED] * 191] and order == list(range(9))
        assert all(r.retry_after >= 1 for r in results[9:])
        assert (admission.running, admission.queued) == (0, 0)
        assert await enter(admission, work(7)) == 7

    asyncio.run(main())


def test_the_time_to_return_follows_the_queue():
    async def main():
        admission = Admission(2, 6)
        await enter(admission, lambda seconds: time.sleep(0.6))
        gate = threading.Event()
        tasks = [asyncio.ensure_future(enter(admission, lambda seconds: gate.wait(20))) for _ in range(8)]
        await settle(lambda: admission.running == 2)
        with pytest.raises(ServingError, match="2 running, 6 waiting.; retry after 3 s") as caught:
            admission.check()
        assert caught.value.retry_after == 3  # 8 places of about 0.6 s, two at a time
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_deadline_that_passes_in_the_queue_is_never_run():
    async def main():
        admission, gate, ran = Admission(1, 4), threading.Event(), []
        now = asyncio.get_running_loop().time()
        first = asyncio.ensure_future(enter(admission, lambda seconds: gate.wait(20)))
        await settle(lambda: admission.running == 1)
        late = asyncio.ensure_future(enter(admission, ran.append, now + 0.05))
        early = asyncio.ensure_future(enter(admission, lambda seconds: seconds, now + 30))
        with pytest.raises(ServingError, match="the deadline passed while the request waited"):
            await late
        assert (admission.queued, admission.expired) == (1, 1)
        gate.set()
        assert await first is True and 25 < await early < 30 and ran == []

    asyncio.run(main())


def test_leaving_the_queue_frees_the_place_and_leaving_a_run_does_not():
    async def main():
        admission, gate, ran = Admission(1, 1), threading.Event(), []
        first = asyncio.ensure_future(enter(admission, lambda seconds: gate.wait(20)))
        await settle(lambda: admission.running == 1)
        second = asyncio.ensure_future(enter(admission, ran.append))
        await settle(lambda: admission.queued == 1)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert (admission.queued, admission.abandoned) == (0, 1)
        third = asyncio.ensure_future(enter(admission, lambda seconds: "third"))
        await settle(lambda: admission.queued == 1)
        first.cancel()
        await asyncio.sleep(0.05)
        assert admission.running == 1 and not third.done()  # the device is still busy with what nobody waits for
        gate.set()
        assert await third == "third" and ran == []
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(main())


def test_a_failing_run_affects_no_other():
    async def main():
        admission = Admission(2, 50)

        def fail(seconds):
            raise ValueError("broken")

        works = [fail if i % 3 == 0 else (lambda seconds, i=i: i) for i in range(40)]
        results = await asyncio.gather(*(enter(admission, work) for work in works), return_exceptions=True)
        assert outcomes(results) == [ValueError if i % 3 == 0 else i for i in range(40)]
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(main())


def test_a_place_that_is_not_used_is_given_back():
    admission = Admission(1, 0)
    with pytest.raises(KeyError), admission.place():
        assert admission.queued == 1
        raise KeyError
    assert admission.queued == 0
