"""What a benchmark measured, for people: one table, the ratios that mean something, a bar chart. No TensorFlow."""

import numpy as np

from models.errors import InputError
from pipeline.benchmark import differences
from pipeline.benchmark.differences import Expected, label, same_work
from pipeline.benchmark.timing import TOTAL, summary

STAGES = ("text_encoder", "diffusion", "decoder", TOTAL)
LOAD_PER_CORE = 0.5  # from here on the machine was not idle when measuring began
BUSY = 0.5  # cores that a row keeps busy at the least, where there is no GPU
STEADY = 1.25  # p90 / min of a row's total; above, something else was running


def order(rows: int, rounds: int) -> list[int]:
    """Row numbers in the order of measuring: every other round backwards, so that a drift hits all rows alike."""
    return [i for r in range(rounds) for i in (range(rows) if r % 2 == 0 else reversed(range(rows)))]


def pooled(row: dict, answers: list[dict], price_per_hour: float | None, wanted: Expected | None = None) -> dict:
    """One row with the answers of all its rounds.

    Args:
        row: what was asked for.
        answers: of `timing.isolated`, one per round so far; failed ones hold "error".
        price_per_hour: dollars, or None.
        wanted: what it should draw.

    Returns:
        `row` with stages (stage -> `timing.summary` of all rounds' times), the rounds themselves, and what follows
        from the medians; with error where a round failed.
    """
    entry = {**row, "rounds": [{k: v for k, v in answer.items() if k != "images"} for answer in answers]}
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        entry["error"] = errors[0]
    good = [answer for answer in answers if "error" not in answer]
    if not good:
        return entry
    samples = {stage: [s for answer in good for s in answer["samples"][stage]] for stage in good[0]["samples"]}
    stages = {stage: summary(seconds) for stage, seconds in samples.items()}
    images_per_second = row["images"] / stages[TOTAL]["p50"]
    entry |= {
        "stages": stages,
        "first": good[0]["first"],
        "load_seconds": good[0]["load_seconds"],
        "cold_start": cold_start(good[0], stages[TOTAL]["p50"]),
        "seconds_per_step": stages["diffusion"]["p50"] / row["settings"]["num_steps"],
        "images_per_second": images_per_second,
        "cores_busy": float(np.mean([answer["cores_busy"] for answer in good])),
        "picture": differences.picture(good[-1]["images"], wanted),
        **{name: _largest(good, name) for name in ("peak_rss_bytes", "peak_anonymous_bytes")},
    }
    if price_per_hour is not None:
        entry["images_per_dollar"] = images_per_second * 3600 / price_per_hour
    return entry


def cold_start(answer: dict, warm: float) -> dict[str, float]:
    """Seconds from the start of a process to its first picture, in parts that add up to total.

    Args:
        answer: of `timing.isolated`. warm: median seconds of a call that compiles nothing; what the first took longer
            is compile, which includes tracing and the first touch of the weights.
    """
    first = answer["first"][TOTAL]
    compiling = max(first - warm, 0.0)
    parts = {"import": answer["import_seconds"], "load": answer["load_seconds"], "compile": compiling}
    parts["run"] = first - compiling
    return {**parts, TOTAL: sum(parts.values())}


def _largest(answers: list[dict], name: str) -> int | None:
    return max((answer[name] for answer in answers if answer[name] is not None), default=None)


def text(result: dict) -> str:
    """The whole result as aligned tables and notes."""
    rows = [row for row in result["rows"] if "stages" in row]
    lines = []
    if rows:
        lines += [
            *table(_stage_cells(rows), left=(0, 1)),
            "",
            *table(_row_cells(rows), left=(0, len(_row_cells(rows)[0]) - 1)),
            "",
            *table(_cold_cells(rows), left=(0, 6)),
            "",
        ]
    lines += notes(result)
    return "\n".join(lines)


def _stage_cells(rows: list[dict]) -> list[list[str]]:
    cells = [["seconds", "stage", "first call", "min", "p50", "p90", "mean", "n"]]
    for row in rows:
        for i, stage in enumerate(STAGES):
            s = row["stages"][stage]
            numbers = [row["first"][stage], *(s[key] for key in ("min", "p50", "p90", "mean"))]
            cells.append([label(row) if i == 0 else "", stage.replace("_", " ")])
            cells[-1] += [*map(number, numbers), str(s["n"])]
    return cells


def _row_cells(rows: list[dict]) -> list[list[str]]:
    priced = any("images_per_dollar" in row for row in rows)
    beside = any("to_ours" in row and row["kind"] != "export" for row in rows)
    head = ["at p50", "load s", "s/step", "images/s", "images/$", "to ours", "peak RSS MB", "anonymous MB"]
    head += ["cores busy", "what"]
    cells = [[name for name in head if (priced or name != "images/$") and (beside or name != "to ours")]]
    for row in rows:
        chosen = row["settings"]
        size = f"{row['images']} x {row['width']}x{row['height']}, {row['dtype']}"
        if row.get("random_seed") is not None:
            size += ", random weights (load makes them)"
        cells.append(
            [
                *(label(row), number(row["load_seconds"]), number(row["seconds_per_step"])),
                *(number(row["images_per_second"]), *([number(row["images_per_dollar"])] if priced else [])),
                *([times(row, TOTAL)] if beside else []),
                *(megabytes(row["peak_rss_bytes"]), megabytes(row["peak_anonymous_bytes"]), f"{row['cores_busy']:.1f}"),
                f"{size}; {chosen['sampler']} {chosen['num_steps']} steps, guidance {chosen['guidance_scale']:g}",
            ]
        )
    return cells


def _cold_cells(rows: list[dict]) -> list[list[str]]:
    cells = [["cold start", "import s", "load s", "compile s", "run s", "first picture s", "compile cache"]]
    for row in rows:
        found = row["rounds"][0].get("device", {}).get("compile_cache")
        cache = "none" if found is None else f"{found} programs found"
        cells.append([label(row), *map(number, row["cold_start"].values()), cache])
    return cells


def number(value: float) -> str:
    """Four significant digits, never in powers of ten."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}" if value >= 0.001 else f"{value:.6f}"


def times(row: dict, key: str) -> str:
    """How many times our seconds a row takes, `TOTAL` or seconds_per_step; nothing where nothing is comparable."""
    return f"{row['to_ours'][key]:.2f} x" if "to_ours" in row else ""


def megabytes(value: int | None) -> str:
    """Whole megabytes (10^6 bytes)."""
    return "?" if value is None else f"{value / 1e6:.0f}"


def table(cells: list[list[str]], left: tuple[int, ...]) -> list[str]:
    """Lines with aligned columns; those in `left` to the left, the others, numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in cells
    ]
    return ["  ".join(row).rstrip() for row in aligned]


# === Notes ===


def notes(result: dict) -> list[str]:
    """Ratios, what they stand on, and whatever should make a reader careful."""
    rows = [row for row in result["rows"] if "stages" in row]
    lines = [*ratios(rows), *differences.notes(rows), *_conditions(result)]
    lines += [f"{label(row)}: {how(row, {})}" for row in rows if "flags" in device(row)]
    if any("to_ours" in row and row["kind"] != "export" for row in rows):
        lines.append("to ours: seconds of the whole chain as a multiple of our fastest row's for the same work")
    starred = {row["call_path"] for row in rows if row["kind"] != "export"}
    lines += [f"* another call path: {path}. Exports: encode, denoise, decode." for path in sorted(starred)]
    for row in rows:
        if row["jit_compile"] and not row["rounds"][-1].get("device", {}).get("xla_available", True):
            lines.append(f"careful: {row['name']} ran without XLA: its device has no XLA compiler")
        if row["cores_busy"] < BUSY and not result["machine"]["gpus"]:
            lines.append(f"careful: {row['name']} had {row['cores_busy']:.1f} cores: something else was running")
        spread = row["stages"][TOTAL]["p90"] / row["stages"][TOTAL]["min"]
        if spread > STEADY:
            lines.append(
                f"careful: {row['name']} is unsteady: p90 is {spread:.2f} x the minimum; more --repeats, --rounds"
            )
    return lines + [f"failed: {row['name']}: {row['error']}" for row in result["rows"] if "error" in row]


def ratios(rows: list[dict]) -> list[str]:
    """XLA against plain for the same networks on the same call path; other call paths only when marked with a star."""
    lines = []
    for of in dict.fromkeys(row["of"] for row in rows):
        plain, xla = (
            next((r for r in rows if r["of"] == of and r["jit_compile"] is jit), None) for jit in (False, True)
        )
        if plain and xla:
            lines.append(f"speed of {label(xla)} to {label(plain)}: {_speed(plain, xla)}")
    for row in rows:
        for other in rows:
            if row["kind"] == "export" and other["kind"] != "export" and _comparable(row, other):
                lines.append(f"speed of {label(row)} to {label(other)}: {_speed(other, row)} (* different call paths)")
    return lines


def _speed(slow: dict, fast: dict) -> str:
    def ratio(stage, key):
        return f"{slow['stages'][stage][key] / fast['stages'][stage][key]:.2f} x"

    by_medians = f"{ratio(TOTAL, 'p50')} (diffusion {ratio('diffusion', 'p50')}) by medians"
    return f"{by_medians}, {ratio(TOTAL, 'min')} (diffusion {ratio('diffusion', 'min')}) by minima"


def _comparable(ours: dict, row: dict) -> bool:
    """KerasCV is compared with and without XLA; peers that have no XLA are whatever they are at their best."""
    return same_work(ours, row) and (row["kind"] != "kerascv" or ours["jit_compile"] == row["jit_compile"])


def with_ratios(rows: list[dict]) -> list[dict]:
    """Rows with to_ours: their seconds as multiples of those of our fastest row for the same work, where there is one.

    Its keys: of (our row's name), seconds_per_step, total.
    """
    measured = [row for row in rows if "stages" in row]
    exports = [row for row in measured if row["kind"] == "export" and not row.get("server")]
    result = []
    for row in rows:
        same = [ours for ours in exports if "stages" in row and _comparable(ours, row)]
        if same:
            ours = min(same, key=lambda entry: entry["stages"][TOTAL]["p50"])
            total = row["stages"][TOTAL]["p50"] / ours["stages"][TOTAL]["p50"]
            step = row["seconds_per_step"] / ours["seconds_per_step"]
            row = {**row, "to_ours": {"of": ours["name"], "seconds_per_step": step, TOTAL: total}}
        result.append(row)
    return result


def device(row: dict) -> dict:
    """What a row's worker said of what it ran on; empty when no round got that far."""
    return next((answer["device"] for answer in row["rounds"] if "device" in answer), {})


def how(row: dict, environment: dict[str, str | None]) -> str:
    """The settings a row ran with, in words; a peer's are its worker's own, with versions."""
    facts = device(row)
    if "flags" in facts:
        return "; ".join([facts["flags"], ", ".join(f"{name} {v}" for name, v in facts.get("versions", {}).items())])
    own = row.get("environment", {})
    if row["jit_compile"] or own:
        own = {name: environment.get(name) for name in ("XLA_FLAGS", "TF_XLA_FLAGS")} | own
    how = f"XLA: {', '.join(row['jit_components'])}" if row["jit_compile"] else "plain graph"
    return "; ".join([how, *(f"{name}={value}" for name, value in own.items() if value)])


def _conditions(result: dict) -> list[str]:
    machine, versions = result["machine"], result["versions"]
    ours = next((device(row) for row in result["rows"] if "tf32" in device(row)), None)
    flags = [name for name, present in (machine["cpu_flags"] or {}).items() if present]
    software = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines = [f"on {machine['cpu']}, {machine['usable_cores']} cores ({' '.join(flags) or 'flags unknown'}); {software}"]
    if result["commit"]:
        lines[0] += f", commit {result['commit'][:10]}{' with changes' if result['uncommitted_changes'] else ''}"
    lines += [f"on {gpu}" for gpu in machine["gpus"]]
    environment = [f"{name}={value}" for name, value in machine["environment"].items() if value is not None]
    if ours:
        threads = f"{ours['intra_op_threads'] or 'all'} intra-op, {ours['inter_op_threads'] or 'all'} inter-op"
        environment = [f"TF32 {'on' if ours['tf32'] else 'off'}", f"threads: {threads}", *environment]
    lines.append("; ".join(environment) or "no settings known")
    lines.append(
        "first call: traces and compiles, in no other column; load: files already in the page cache, checksums not "
        "included; a stage ends when its results are on the host; cores busy: CPU seconds / seconds"
    )
    if len(result["order"]) > 1:
        alternating = len(set(result["order"])) < len(result["order"])
        how = (
            "alternated, every other round backwards"
            if alternating
            else "ran one after another; --rounds alternates them"
        )
        lines.append(f"rows {how}")
    load, cores = (machine["load_average"] or [0])[0], machine["usable_cores"] or 1
    if load > LOAD_PER_CORE * cores:
        lines.append(
            f"careful: load average {load:.2f} on {cores} cores before the first row: the machine was not idle"
        )
    return lines


# === Plot ===


def plot(result: dict, path: str) -> None:
    """A PNG with one panel per stage, one bar per row: medians, with whiskers from the minimum to p90.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"--plot needs matplotlib ({error}): python -m pip install matplotlib") from error
    rows = [row for row in result["rows"] if "stages" in row]
    figure = Figure(figsize=(11, 1.6 + 0.8 * len(rows)), layout="constrained")
    panels = figure.subplots(2, 2)
    for panel, stage in zip(panels.flat, STAGES, strict=True):
        medians = [row["stages"][stage]["p50"] for row in rows]
        low = [m - row["stages"][stage]["min"] for m, row in zip(medians, rows, strict=True)]
        high = [row["stages"][stage]["p90"] - m for m, row in zip(medians, rows, strict=True)]
        colors = [_color(row) for row in rows]
        bars = panel.barh([label(row) for row in rows], medians, xerr=[low, high], color=colors, capsize=3)
        panel.bar_label(bars, [f" {number(m)} s" for m in medians], padding=4)
        panel.set(title=stage.replace("_", " "), xlim=(0, 1.5 * max(m + h for m, h in zip(medians, high, strict=True))))
        panel.invert_yaxis()
        panel.locator_params(axis="x", nbins=5)
    figure.supxlabel("seconds per call: median, min to p90" + ("   * another call path" if _starred(rows) else ""))
    figure.suptitle(f"{result['machine']['cpu']}, {', '.join(result['machine']['gpus']) or 'no GPU'}")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise InputError(f"--plot {path}: cannot be written ({error.strerror})") from error


def _color(row: dict) -> str:
    return "tab:green" if row.get("same_noise") else "tab:orange" if row["jit_compile"] else "tab:blue"


def _starred(rows: list[dict]) -> bool:
    return any(row["kind"] != "export" for row in rows)
