"""A server under load: many clients at once, and what a server adds to the time of a call. No TensorFlow."""

import collections
import threading
import time
from collections.abc import Callable

import numpy as np

from models.errors import InputError
from pipeline.benchmark.report import STAGES, number
from pipeline.benchmark.timing import TOTAL, summary

Draw = Callable[[], object]  # one picture, or raises InputError


def run(connect: Callable[[], Draw], clients: int, duration: float) -> dict:
    """Let clients draw one picture after another, each with a connection of its own; all begin at the same time.

    Args:
        connect: makes one client; called once for each, before the clock starts.
        duration: seconds after which no client begins another picture.

    Returns:
        clients, seconds (until the last picture), latency (`timing.summary` of seconds per picture, and p99; None
        where none was drawn), calls_per_second, errors (text -> count, after the client's own repetitions).

    Raises:
        InputError: a client cannot connect, or --clients or --duration make no load.
    """
    if clients < 1 or not duration > 0:
        raise InputError(f"--clients must be 1 or more and --duration above 0, found {clients} and {duration}")
    draws = [connect() for _ in range(clients)]
    seconds: list[list[float]] = [[] for _ in draws]
    errors: list[collections.Counter] = [collections.Counter() for _ in draws]
    begin = threading.Barrier(clients + 1)
    stop = threading.Event()

    def work(client: int) -> None:
        begin.wait()
        end = time.perf_counter() + duration
        while not stop.is_set() and (start := time.perf_counter()) < end:
            try:
                draws[client]()
                seconds[client].append(time.perf_counter() - start)
            except InputError as error:
                errors[client][str(error)] += 1

    threads = [threading.Thread(target=work, args=(client,), daemon=True) for client in range(clients)]
    for thread in threads:
        thread.start()
    begin.wait()
    started = time.perf_counter()
    try:
        for thread in threads:
            thread.join()
    finally:
        stop.set()  # Ctrl-C: what has begun ends, nothing more begins
    wall = time.perf_counter() - started
    drawn = [second for found in seconds for second in found]
    return {
        "clients": clients,
        "seconds": wall,
        "latency": {**summary(drawn), "p99": float(np.percentile(drawn, 99))} if drawn else None,
        "calls_per_second": len(drawn) / wall,
        "errors": dict(sum(errors, collections.Counter())),
    }


def text(load: dict, images: int) -> list[str]:
    """What `run` found, for people; `images` of a call."""
    latency = load["latency"]
    times = ", ".join(f"{key} {number(latency[key])}" for key in ("p50", "p90", "p99", "max")) if latency else "none"
    failed = sum(load["errors"].values())
    lines = [
        f"{load['clients']} client(s) for {load['seconds']:.1f} s: {latency['n'] if latency else 0} calls, "
        f"{number(load['calls_per_second'] * images)} images/s; seconds per call: {times}; {failed} error(s)"
    ]
    return lines + [f"  {count} x {error}" for error, count in sorted(load["errors"].items())]


def overhead(rows: list[dict]) -> list[str]:
    """What a server adds to each stage of the same call of the same export, a stage being one call of the server.

    Args:
        rows: of a benchmark's result; those over a server have "server", its URL.
    """
    lines = []
    measured = [row for row in rows if "stages" in row and row["kind"] == "export"]
    for row in measured:
        here = [other for other in measured if not other.get("server") and _same_call(row, other)]
        if row.get("server") and here:
            added = []
            for stage in STAGES:
                fast, slow = here[0]["stages"][stage], row["stages"][stage]
                by_medians, by_minima = ((slow[key] - fast[key]) * 1000 for key in ("p50", "min"))
                share = by_medians / fast["p50"] / 10
                text = f"{stage.replace('_', ' ')} {by_medians:+.1f} ms ({by_minima:+.1f} by minima"
                added.append(text + (f"; {share:+.1f} % of {number(fast['p50'])} s)" if stage == TOTAL else ")"))
            same = row["picture"]["sha256"] == here[0]["picture"]["sha256"]
            lines.append(
                f"{row['server']} adds to {here[0]['name']}: {', '.join(added)}; "
                + ("the same picture, bit for bit" if same else "careful: another picture")
            )
    return lines


def _same_call(a: dict, b: dict) -> bool:
    keys = ("jit_compile", "settings", "height", "width")
    return a["export"]["export_id"] == b["export"]["export_id"] and all(a[key] == b[key] for key in keys)
