"""What a benchmark measured as a Markdown table: a row per peer, dtype and size. No TensorFlow."""

from pathlib import Path

from models.errors import InputError
from pipeline.benchmark import differences, report
from pipeline.benchmark.timing import TOTAL

HEAD = ("", "dtype", "pixels", "s per step", "chain, s", "peak RSS, MB", "step to ours", "chain to ours", "how")


def text(result: dict) -> str:
    """The rows of a result, what they stand on, and what should make a reader careful."""
    environment = result["machine"]["environment"]
    rows = [row for row in result["rows"] if "stages" in row]
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(_cells(row, environment)) for row in rows]
    return "\n".join([*lines, "", f"{result['date']}:", "", *(f"* {note}" for note in report.notes(result))]) + "\n"


def _cells(row: dict, environment: dict) -> list[str]:
    # A star would start emphasis.
    return [
        *(differences.label(row).replace("*", "\\*"), row["dtype"], f"{row['width']}x{row['height']}"),
        *(report.number(row["seconds_per_step"]), report.number(row["stages"][TOTAL]["p50"])),
        report.megabytes(row["peak_rss_bytes"]),
        *(report.times(row, key) for key in ("seconds_per_step", TOTAL)),
        report.how(row, environment).replace("|", "\\|"),
    ]


def _line(cells) -> str:
    return f"| {' | '.join(cells)} |"


def write(result: dict, path: str) -> None:
    """Write the table. Raises InputError when it cannot be written."""
    try:
        Path(path).write_text(text(result), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--markdown {path}: cannot be written ({error.strerror})") from error
