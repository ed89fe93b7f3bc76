"""The page's body: a section a kind of measurement, with its figure, how it was made, and a table of its numbers."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from lengthen.report import papers
from lengthen.report.collect import Curve, Record, Report, Run
from lengthen.report.series import Chart, amount, plus_minus, shown
from lengthen.report.words import ABOUT, MISSING, PROTOCOLS, RELATIVE


def body(report: Report, charts: Sequence[Chart], maps: Sequence[Chart]) -> str:
    """Return the sections that the runs have numbers for, and what is missing."""
    there = {chart["id"] for chart in charts} | {found["kind"] for found in maps}
    parts = [_warning(report), _perplexity(report), _summary(report)]
    if "resolution" in there:
        parts.append(_section("resolution", _figure("resolution") + _made(report, "resolution") + _resolution(report)))
    if "positions" in there:
        parts.append(_section("positions", _figure("positions") + _made(report, "positions") + _curse(report)))
    if "reach" in there:
        parts.append(_section("reach", _map("reach") + _made(report, "reach")))
    if "distance" in there:
        parts.append(_section("distance", _map("distance") + _made(report, "distance")))
    if "recall" in there:
        parts.append(_section("recall", _figure("recall") + _made(report, "recall") + _recall(report)))
    parts.append(
        _section("speed", (_figure("speed") if "speed" in there else "") + _speed_made(report) + _speed(report))
    )
    parts += [_every(report), _sources(), _missing(report, there)]
    return "\n".join(filter(None, parts))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", first: int = 1) -> str:
    """Return a table that scrolls within itself; the first columns are text and head their rows."""
    out = ["<div class=scroll tabindex=0 role=region", f' aria-label="{escape(caption or head[0])}"><table>']
    if caption:
        out.append(f"<caption>{escape(caption)}</caption>")
    out.append(
        "<thead><tr>"
        + "".join(f"<th scope=col{' class=text' * (i < first)}>{escape(str(cell))}</th>" for i, cell in enumerate(head))
        + "</tr></thead><tbody>"
    )
    for row in rows:
        cells = [f"<th scope=row>{escape(str(cell))}</th>" for cell in row[:first]]
        cells += [f"<td>{escape(str(cell))}</td>" for cell in row[first:]]
        out.append("<tr>" + "".join(cells) + "</tr>")
    return "".join([*out, "</tbody></table></div>"])


def command(curve: Curve) -> str:
    """Return the command that measures a curve; several, where the stride goes with the length in a way of its own."""
    strides = [record.get("stride") for record in curve.records]
    if curve.protocol == "sliding" and curve.stride is None and None not in strides and len(strides) > 1:
        usual = all(2 * record["stride"] == record["length"] for record in curve.records)  # what `eval` takes itself
        if not usual:
            each = (replace(curve, stride=record["stride"], records=[record]) for record in curve.records)
            return " && ".join(map(command, each))
    words = ["lengthen", "eval", curve.run.path, "--protocol", curve.protocol]
    words += ["--lengths", ",".join(str(record["length"]) for record in curve.records)]
    if curve.stride is not None:
        words += ["--stride", str(curve.stride)]
    if curve.block is not None:
        words += ["--block", str(curve.block)]
    tokens = {record.get("tokens") for record in curve.records}
    if len(tokens) == 1 and None not in tokens:
        words += ["--tokens", str(tokens.pop())]
    if curve.split not in (None, "validation"):
        words += ["--split", str(curve.split)]
    return shlex.join([*words, "--data", "DATA"])


def _section(name: str, content: str) -> str:
    title, text = ABOUT[name]
    return f'<section id="s-{name}"><h2>{escape(title)}</h2><p>{escape(text)}</p>{content}</section>'


def _figure(name: str) -> str:
    without = "<noscript>The figure needs JavaScript; the tables do not.</noscript>"
    return f'<div class=chart data-chart="{name}">{without}</div>'


def _map(kind: str) -> str:
    without = "<noscript>The maps need JavaScript; --csv writes their numbers.</noscript>"
    return f'<div class=maps data-maps="{kind}">{without}</div>'


def _how(content: str) -> str:
    return f"<details class=how><summary>How this was made</summary>{content}</details>"


def _summary(report: Report) -> str:
    rows = []
    for run in report.runs:
        model = run.model
        size = " × ".join(shown(model[key]) for key in ("layers", "width", "heads") if key in model) or "n.a."
        training = run.training or {}
        newest = max(run.evaluations, key=lambda record: record.get("step") or 0)
        about = [run.label, run.path, run.train_length, size, newest.get("step"), training.get("tokens_per_second")]
        rows.append([about[0], about[1], *(cell if isinstance(cell, str) else shown(cell) for cell in about[2:])])
    head = ("method", "run", "trained at", "layers × width × heads", "steps", "training tokens a second")
    return _section("runs", table(head, rows, first=2))


def _warning(report: Report) -> str:
    marks = {(record.get("data"), record.get("split")) for run in report.runs for record in run.evaluations}
    if len(marks) == 1:
        return ""
    return (
        "<p class=warning role=note>These numbers are from different texts: the data's fingerprint or the split "
        "differs. Perplexities on different texts, or with different vocabularies, cannot be compared; their "
        "ratios to the value at the training length can.</p>"
    )


def _perplexity(report: Report) -> str:
    curves = report.curves
    lengths = sorted({record["length"] for curve in curves for record in curve.records})
    rows = []
    for curve in curves:
        by = {record["length"]: plus_minus(record) for record in curve.records}
        rows.append([curve.label, shown(curve.run.train_length), *(by.get(length, "") for length in lengths)])
    head = ["method", "trained at", *(f"{length:,}" for length in lengths)]
    numbers = table(head, rows, "Perplexity a token by length, ± one standard error")
    protocols = {curve.protocol for curve in curves}
    how = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(PROTOCOLS[name])}</dd>" for name in PROTOCOLS if name in protocols
    )
    made = _how(f"<p>{escape(PROTOCOLS[''])}</p><dl>{how}</dl>" + "".join(_measured(curve) for curve in curves))
    note = f"<p class=note id=relative-note>{escape(RELATIVE)}</p>"
    return _section("perplexity", _figure("perplexity") + note + made + numbers)


def _measured(curve: Curve) -> str:
    tokens = sorted({record["tokens"] for record in curve.records if record.get("tokens") is not None})
    devices = sorted({record["device"] for record in curve.records if record.get("device")})
    few = tokens if len(tokens) < 3 else [tokens[0], tokens[-1]]
    facts = [
        f"{' to '.join(shown(count) for count in few) or 'n.a.'} tokens a length",
        f"data {curve.data or 'n.a.'}, {curve.split or 'n.a.'}",
        f"checkpoint {curve.checkpoint or 'n.a.'}",
        f"on {', '.join(devices) or 'n.a.'}",
    ]
    said = next((str(record["command"]) for record in curve.records if record.get("command")), command(curve))
    return f"<p><b>{escape(curve.label)}</b>: {escape('; '.join(facts))}<br><code>{escape(said)}</code></p>"


def _made(report: Report, kind: str) -> str:
    parts = []
    for run in report.runs:
        analysis = run.analyses.get(kind)
        if analysis is None:
            continue
        facts = f"checkpoint {analysis.get('checkpoint') or 'n.a.'}"
        if kind != "recall":
            facts += f"; data {analysis.get('data') or 'n.a.'}"
        said = str(analysis.get("command") or analysis_command(run, kind))
        parts.append(f"<p><b>{escape(run.label)}</b>: {escape(facts)}<br><code>{escape(said)}</code></p>")
    return _how(f"<p>{escape(ABOUT[kind][1])}</p>" + "".join(parts))


def analysis_command(run: Run, kind: str) -> str:
    """Return the command that makes an analysis: with its lengths, if it was made."""
    words = ["lengthen", "analyse", run.path, "--what", kind]
    rows = run.analyses.get(kind, {"rows": []})["rows"]
    lengths = sorted({row["distance" if kind == "recall" else "length"] for row in rows})
    if lengths:
        words += ["--lengths", ",".join(map(str, lengths))]
    blocks = {row.get("block") for row in rows if row.get("blockwise")}
    if blocks:
        words += ["--blockwise", *(part for block in blocks if block for part in ("--block", str(block)))]
    return shlex.join(words if kind == "recall" else [*words, "--data", "DATA"])


def _resolution(report: Report) -> str:
    rows = []
    for run in report.runs:
        for row in run.analyses.get("resolution", {"rows": []})["rows"]:
            block = (
                f"blockwise {shown(row['block'])}" if row.get("block") else "blockwise" if row.get("blockwise") else ""
            )
            layers = ", ".join(shown(value, 3) for value in row.get("layers") or [])
            rows.append([run.label, shown(row["length"]), block, shown(row["resolution"], 3), layers])
    return table(("method", "length", "attention", "resolution", "by layer"), rows)


def _curse(report: Report) -> str:
    rows: list[Sequence[str]] = []
    for run in report.runs:
        curse = run.analyses.get("positions", {}).get("curse")
        if curse:
            keys = ("short", "long", "gain", "from_context", "from_curse")
            rows.append([run.label, *(shown(curse.get(key), 3) for key in keys)])
    if not rows:
        return ""
    head = ("method", "short", "long", "gain in loss", "from more context", "from fewer early tokens")
    return f"<p>{escape(ABOUT['curse'][1])}</p>{table(head, rows, ABOUT['curse'][0])}"


def _recall(report: Report) -> str:
    found = {run.label: run.analyses["recall"]["rows"] for run in report.runs if "recall" in run.analyses}
    distances = sorted({row["distance"] for rows in found.values() for row in rows})
    lines = []
    for label, rows in found.items():
        by = {row["distance"]: shown(row["accuracy"], 3) for row in rows}
        lines.append([label, *(by.get(distance, "") for distance in distances)])
    return table(["method", *(f"{distance:,}" for distance in distances)], lines, "Share recalled by distance")


def _speed(report: Report) -> str:
    curves = report.curves
    lengths = sorted({record["length"] for curve in curves for record in curve.records})
    rows = []
    for curve in curves:
        by = {
            record["length"]: f"{shown(record.get('tokens_per_second'))} · {amount(record.get('peak_bytes'))}"
            for record in curve.records
        }
        rows.append([curve.label, *(by.get(length, "") for length in lengths)])
    own = table(["method", *(f"{length:,}" for length in lengths)], rows, "Tokens a second · peak memory, by length")
    head = ("method", "length", "training words a second", "evaluation words a second", "memory, GB")
    keys = ("train_length", "train_words_per_second", "eval_words_per_second", "memory_gb")
    theirs = [[row["method"], *(shown(row[key]) for key in keys)] for row in papers.speed_memory()]
    other = table(head, theirs, "ALiBi, table 1: a model of 247M parameters, one V100")
    return f"{own}<details><summary>The ALiBi paper's speed and memory</summary>{other}</details>"


def _speed_made(report: Report) -> str:
    trained = [
        f"{run.label}: training, median over {shown(run.training['steps'])} steps in metrics.jsonl, "
        f"{shown(run.training['tokens_per_second'])} tokens a second"
        for run in report.runs
        if run.training is not None
    ]
    lines = "".join(f"<p>{escape(line)}</p>" for line in trained)
    return _how(f"<p>{escape(ABOUT['speed-how'][1])}</p>{lines}{''.join(_measured(curve) for curve in report.curves)}")


def _every(report: Report) -> str:
    keys = (
        "checkpoint",
        "protocol",
        "length",
        "stride",
        "block",
        "tokens",
        "documents",
        "loss",
        "loss_se",
        "perplexity",
    )
    more = (
        "perplexity_per_word",
        "bits_per_byte",
        "tokens_per_second",
        "seconds",
        "peak_bytes",
        "device",
        "split",
        "data",
    )

    def cell(record: Record, key: str) -> str:
        value = record.get(key)
        return value if isinstance(value, str) else "" if value is None else shown(value)

    rows = [
        [run.label, *(cell(record, key) for key in (*keys, *more))] for run in report.runs for record in run.evaluations
    ]
    head = ["method", *(key.replace("_", " ") for key in (*keys, *more))]
    inner = table(head, rows, "Every measurement, other checkpoints included")
    return (
        f"<section id=s-every><details><summary>Every measurement ({len(rows):,})</summary>{inner}</details></section>"
    )


def _sources() -> str:
    items = "".join(
        f'<li>{escape(name)}: {escape(title)}, <a href="{escape(link)}" rel=noreferrer>{escape(link)}</a></li>'
        for name, (title, link) in papers.SOURCES.items()
    )
    return f"<section id=s-papers><h2>The papers</h2><p>{escape(ABOUT['papers'][1])}</p><ul>{items}</ul></section>"


def _missing(report: Report, there: set[str]) -> str:
    items = []
    for kind, what in MISSING.items():
        able = [run for run in report.runs if kind != "reach" or "alibi" in run.positions]
        lacking = [run for run in able if kind not in run.analyses]
        if lacking:
            who = "no run has it" if kind not in there else f"not for {', '.join(run.label for run in lacking)}"
            commands = "<br>".join(f"<code>{escape(analysis_command(run, kind))}</code>" for run in lacking)
            items.append(f"<li>{escape(what)}: {escape(who)}.<br>{commands}</li>")
    if not items:
        return ""
    return f"<section id=s-missing><h2>Not measured</h2><ul>{''.join(items)}</ul></section>"
