"""Turns finished runs into one HTML page: claims, curves, figures, configuration.

    python experiments/report.py runs/fk_steering runs/other --output report.html

The page needs nothing beside it and no network: figures are inlined, curves are SVG, and it follows the reader's light or
dark setting. It shows what `launch.py` leaves in a workdir:

    config.json      what was asked for
    summary.json     config, versions, devices, seconds, metrics, params_digest, claims (absent while a run is unfinished)
    metrics.jsonl    one JSON object a line: scalars, and the step they were logged at
    figures/*.png

A run that is still going is shown with the curves it has. A workdir that is missing or cannot be read is named on standard
error and makes the exit status 1; the others are still shown. Only the standard library is imported.
"""

import argparse
import base64
import html
import json
import math
import pathlib
import sys
from typing import Any, NamedTuple

_PNG = b"\x89PNG\r\n\x1a\n"
_NOT_CURVES = {"step", "time", "timestamp", "wall_time", "seconds"}
_MOST_POINTS = 400

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jaxml25: {title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #c62828; --curve: #1f6feb; }}
@media (prefers-color-scheme: dark) {{ :root {{ --good: #4ac26b; --bad: #ff7b72; --curve: #79b8ff; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
section {{ border-top: 1px solid var(--line); margin-top: 2.5rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }}
th, td {{ border-bottom: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }}
td.number {{ font-variant-numeric: tabular-nums; white-space: nowrap; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }}
.wall {{ display: flex; flex-wrap: wrap; gap: 1.5rem; }}
figure {{ margin: 0; }} figcaption {{ font-size: .85rem; overflow-wrap: anywhere; }}
figure img {{ max-width: 100%; background: #fff; }}
svg {{ width: 20rem; max-width: 100%; }} svg text {{ fill: currentColor; font-size: 11px; }}
svg polyline {{ fill: none; stroke: var(--curve); stroke-width: 1.5; }} svg circle {{ fill: var(--curve); }}
svg rect {{ fill: none; stroke: var(--line); }}
code {{ overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


class Run(NamedTuple):
    """What one workdir holds."""

    path: pathlib.Path
    summary: dict[str, Any] | None  # None while the run is unfinished
    config: Any
    curves: dict[str, list[tuple[float, float]]]
    figures: list[pathlib.Path]
    notes: list[str]  # what could not be read


def read(path: pathlib.Path) -> Run:
    """Reads a workdir.

    Raises:
      ValueError: if `path` is no folder, holds no run, or its `summary.json` is malformed.
    """
    if not path.is_dir():
        raise ValueError("there is no such folder")
    summary_file, metrics_file = path / "summary.json", path / "metrics.jsonl"
    if not summary_file.exists() and not metrics_file.exists():
        raise ValueError("it holds neither summary.json nor metrics.jsonl, so no run wrote it")
    summary = _read_summary(summary_file) if summary_file.exists() else None
    curves, notes = _read_curves(metrics_file)
    figures = []
    for figure in sorted((path / "figures").glob("*.png")):
        if figure.read_bytes()[: len(_PNG)] == _PNG:
            figures.append(figure)
        else:
            notes.append(f"figures/{figure.name} is not a PNG image")
    return Run(path, summary, _read_config(path, summary), curves, figures, notes)


def _read_summary(path: pathlib.Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"summary.json is not JSON ({error})") from error
    if not isinstance(summary, dict):
        raise ValueError("summary.json is not a JSON object")
    claims = summary.get("claims", [])
    if not isinstance(claims, list) or not all(isinstance(claim, dict) and "claim" in claim for claim in claims):
        raise ValueError('claims in summary.json is not a list of objects with a "claim"')
    return summary


def _read_config(path: pathlib.Path, summary: dict[str, Any] | None) -> Any:
    if summary is not None:
        return summary.get("config")
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run that has not come far may not have one
        return None


def _read_curves(path: pathlib.Path) -> tuple[dict[str, list[tuple[float, float]]], list[str]]:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    curves, torn = {}, 0
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            items = row.items()
        except (ValueError, AttributeError):
            torn += bool(line.strip())
            continue
        x = row["step"] if _is_number(row.get("step")) else number
        prefix = f"{row['namespace']}/" if isinstance(row.get("namespace"), str) and row["namespace"] else ""
        for name, value in items:
            if name not in _NOT_CURVES and _is_number(value):
                curves.setdefault(prefix + name, {})[x] = value  # a step that was run again after a kill counts once
    notes = [f"{torn} of {len(lines)} lines of metrics.jsonl could not be read"] if torn else []
    return {name: sorted(points.items()) for name, points in curves.items()}, notes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def render(runs: list[Run], problems: list[tuple[pathlib.Path, str]]) -> str:
    """Returns the page that shows `runs` and names the workdirs that could not be read."""
    names = ", ".join(run.path.name for run in runs) or "no run"
    return _PAGE.format(title=html.escape(names), body=_overview(runs, problems) + "".join(map(_section, runs)))


def _overview(runs: list[Run], problems: list[tuple[pathlib.Path, str]]) -> str:
    rows = [[_code(run.path), _verdict(run), _number((run.summary or {}).get("seconds"))] for run in runs]
    rows += [[_code(path), f'<span class="bad">{html.escape(reason)}</span>', ""] for path, reason in problems]
    return _table(["run", "outcome", "seconds"], rows)


def _verdict(run: Run) -> str:
    if run.summary is None:
        return '<span class="bad">unfinished</span>'
    judged = [claim.get("holds") for claim in run.summary.get("claims", []) if claim.get("holds") is not None]
    if not judged:
        return "finished, no claim judged"
    kind = "good" if all(judged) else "bad"
    return f'<span class="{kind}">{sum(map(bool, judged))} of {len(judged)} claims hold</span>'


def _section(run: Run) -> str:
    parts = [f"<h2>{html.escape(run.path.name)}</h2>", f"<p>{_verdict(run)}</p>"]
    parts += [f'<p class="bad">{html.escape(note)}</p>' for note in run.notes]
    summary = run.summary or {}
    if summary.get("claims"):
        parts += ["<h3>Claims</h3>", _claims(summary["claims"])]
    if run.figures:
        parts += ["<h3>Figures</h3>", f'<div class="wall">{"".join(map(_figure, run.figures))}</div>']
    if run.curves:
        parts += ["<h3>Curves</h3>", f'<div class="wall">{"".join(_curve(*item) for item in run.curves.items())}</div>']
    shown = summary | {"config": run.config}
    for key in ("metrics", "config", "versions", "devices", "params_digest"):
        if shown.get(key) not in (None, {}, []):
            rows = [[html.escape(name), _number(value)] for name, value in _flat(shown[key])]
            opened = " open" if key == "metrics" else ""
            parts.append(f"<details{opened}><summary>{key}</summary>{_table(['', ''], rows)}</details>")
    return f"<section>{''.join(parts)}</section>"


def _claims(claims: list[dict[str, Any]]) -> str:
    marks = {True: '<span class="good">yes</span>', False: '<span class="bad">no</span>'}
    rows = []
    for claim in claims:
        measured = _number(claim.get("measured"))
        if claim.get("stderr") is not None:
            measured += f" ± {_number(claim['stderr'])}"
        holds = claim.get("holds")
        verdict = "not judged" if holds is None else marks[bool(holds)]
        sentence = html.escape(str(claim["claim"]))
        rows.append([sentence, _number(claim.get("paper")), measured, _number(claim.get("bar")), verdict])
    return _table(["claim", "paper", "measured", "bar", "holds"], rows)


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in header)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="number">{cell}</td>' if i else f"<td>{cell}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figure(path: pathlib.Path) -> str:
    data, name = base64.b64encode(path.read_bytes()).decode(), html.escape(path.stem)
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"><figcaption>{name}</figcaption></figure>'


def _curve(name: str, points: list[tuple[float, float]]) -> str:
    """A small SVG line; logarithmic when the values are positive and span two decades, broken where they are not finite."""
    points = points[:-1][:: -(-len(points) // _MOST_POINTS)] + points[-1:]
    finite = [y for _, y in points if math.isfinite(y)]
    if not finite:
        return f"<figure><figcaption>{html.escape(name)}: no finite value</figcaption></figure>"
    logarithmic = min(finite) > 0 and max(finite) > 100 * min(finite)
    scale = math.log if logarithmic else float
    x_low, x_high = points[0][0], points[-1][0]
    y_low, y_high = scale(min(finite)), scale(max(finite))

    def place(x, y):
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (scale(y) - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return f"{8 + 304 * across:.1f},{132 - 124 * up:.1f}"

    pieces, piece = [], []
    for x, y in [*points, (0.0, math.nan)]:
        if math.isfinite(y):
            piece.append(place(x, y))
        elif piece:
            pieces.append(piece)
            piece = []
    marks = "".join(_line(piece) for piece in pieces)
    caption = f"{html.escape(name)}{' (log)' if logarithmic else ''}: last {_number(finite[-1])}"
    return (
        f'<figure><svg viewBox="0 0 320 160" role="img" aria-label="{html.escape(name)}">'
        f'<rect x="0.5" y="0.5" width="319" height="139"/>{marks}'
        f'<text x="4" y="14">{_number(max(finite))}</text><text x="4" y="136">{_number(min(finite))}</text>'
        f'<text x="4" y="155">{_number(x_low)}</text><text x="316" y="155" text-anchor="end">{_number(x_high)}</text>'
        f"</svg><figcaption>{caption}</figcaption></figure>"
    )


def _line(piece: list[str]) -> str:
    if len(piece) == 1:
        x, y = piece[0].split(",")
        return f'<circle cx="{x}" cy="{y}" r="2"/>'
    return f'<polyline points="{" ".join(piece)}"/>'


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [row for key, inner in value.items() for row in _flat(inner, f"{name}.{key}" if name else str(key))]
    return [(name, value)]


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if _is_number(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(value if isinstance(value, str) else json.dumps(value))


def _code(path: pathlib.Path) -> str:
    return f"<code>{html.escape(str(path))}</code>"


def main(arguments: list[str] | None = None) -> int:
    """Writes the page; returns the exit status."""
    parser = argparse.ArgumentParser(description="Writes one HTML page that shows the runs in the given workdirs.")
    parser.add_argument("workdirs", metavar="WORKDIR", nargs="+", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("report.html"))
    options = parser.parse_args(arguments)

    runs, problems = [], []
    for path in options.workdirs:
        try:
            runs.append(read(path))
        except (OSError, ValueError) as error:
            problems.append((path, str(error)))
            print(f"{path}: {error}", file=sys.stderr)
    if not runs:
        return 1
    try:
        options.output.write_text(render(runs, problems), encoding="utf-8")
    except OSError as error:
        print(f"cannot write {options.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}: {len(runs)} run(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
