"""How time and memory grow with resolution, images per call and steps: python -m pipeline.growth RESULT.json ...

Reads what `benchmark.py --json` wrote, of any number of runs, and fits for each way of drawing

    y = c pixels^a images^b steps^d

by least squares of the logarithms, over those of the three that vary. A fit over few points is a summary of them, no
law: memory holds the weights as well, and a chain what comes before and after the loop.
"""

import json
from pathlib import Path

import numpy as np

from models.config import InputError, read_json
from pipeline import cli, report
from pipeline.timing import TOTAL

VARIABLES = ("pixels", "images", "steps")
MEASURES = {
    "s per step": lambda row: row["seconds_per_step"],
    "decoder s": lambda row: row["stages"]["decoder"]["p50"],
    "chain s": lambda row: row["stages"][TOTAL]["p50"],
    "anonymous MB": lambda row: row["peak_anonymous_bytes"] and row["peak_anonymous_bytes"] / 1e6,
}


def points(results: list[dict]) -> dict[str, list[dict]]:
    """Way of drawing -> its measurements, each with VARIABLES and MEASURES, by size; of equal ones the last."""
    found: dict[str, dict[tuple, dict]] = {}
    for result in results:
        for row in result["rows"]:
            if "stages" not in row:
                continue
            at = {
                "pixels": row["width"] * row["height"],
                "images": row["images"],
                "steps": row["settings"]["num_steps"],
            }
            measured = {name: read(row) for name, read in MEASURES.items()}
            where = {"size": f"{row['width']}x{row['height']}", "flops_per_step": row.get("flops_per_step")}
            found.setdefault(series(row), {})[tuple(at.values())] = at | measured | where
    return {name: [by[key] for key in sorted(by)] for name, by in found.items()}


def series(row: dict) -> str:
    """What is the same at every size: who drew, of which checkpoint, in which dtype, how."""
    if row["kind"] != "export":
        return " ".join([row["kind"], row["dtype"], *(["XLA"] if row["jit_compile"] else [])])
    export, way = row["export"], row["name"].removeprefix(row["of"]).strip()
    target = {"any": "", "cpu": "for CPUs"}[export["spec"]["target"]]
    return ", ".join(filter(None, [export["checkpoint"], row["dtype"], row.get("approximate"), target, way]))


def fit(measured: list[dict], name: str) -> dict[str, float]:
    """The exponents of those VARIABLES that vary; empty where nothing does, or not every one can be told apart."""
    good = [point for point in measured if point[name]]
    varying = [variable for variable in VARIABLES if len({point[variable] for point in good}) > 1]
    columns = [[1.0, *(np.log(point[variable]) for variable in varying)] for point in good]
    if not varying or np.linalg.matrix_rank(columns) < len(varying) + 1:
        return {}
    exponents = np.linalg.lstsq(columns, np.log([point[name] for point in good]), rcond=None)[0][1:]
    return dict(zip(varying, map(float, exponents), strict=True))


def text(results: list[dict]) -> str:
    """Aligned tables: the measurements of each way, below them the exponents."""
    lines = []
    for name, measured in points(results).items():
        cells = [[name, "images", "steps", *MEASURES, "GFLOP/s"]]
        for point in measured:
            flops = point["flops_per_step"]
            rate = report.number(flops / point["s per step"] / 1e9) if flops else ""
            numbers = [report.number(point[key]) if point[key] else "?" for key in MEASURES]
            cells.append([point["size"], str(point["images"]), str(point["steps"]), *numbers, rate])
        fits = {key: fit(measured, key) for key in MEASURES}
        for variable in VARIABLES:
            if any(variable in exponents for exponents in fits.values()):
                told = [f"^{fits[key][variable]:.2f}" if variable in fits[key] else "" for key in MEASURES]
                cells.append([f"grows with {variable}", "", "", *told, ""])
        lines += [*report.table(cells, left=(0,)), ""]
    return "\n".join(lines).rstrip()


def main(argv):
    if len(argv) < 2:
        raise InputError("nothing to read: expected files that benchmark.py --json wrote")
    results = [read_json(Path(name)) for name in argv[1:]]
    for name, result in zip(argv[1:], results, strict=True):
        if not isinstance(result.get("rows"), list):
            raise InputError(f"{name}: expected a result of benchmark.py --json, found {json.dumps(result)[:60]}")
    try:
        print(text(results))
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"a file is of another version of benchmark.py: its rows lack {error}") from error


if __name__ == "__main__":
    cli.run(main)
