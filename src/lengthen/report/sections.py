"""The page's body: the answer, a table of contents, and a section per kind of measurement."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from lengthen.report import papers
from lengthen.report.charts import Figure, plus_minus, shown
from lengthen.report.collect import Curve, Report, Run, finite
from lengthen.report.tables import COLUMNS, rows
from lengthen.report.words import ABOUT, CURSE, OTHER_TEXTS, PROTOCOLS, READING, RELATIVE


def body(report: Report, found: Mapping[str, Sequence[Figure]]) -> str:
    """Return the sections that the runs have numbers for, and what is missing."""
    parts = {"perplexity": _figure("perplexity", report, found) + _perplexity(report), "runs": _runs(report)}
    more = {"resolution": _resolution, "positions": _curse, "recall": _recall}
    for kind in ("resolution", "positions", "reach", "distance", "recall"):
        if kind in found:
            parts[kind] = _figure(kind, report, found) + _made(report, kind) + more.get(kind, lambda _: "")(report)
    parts["speed"] = _figure("speed", report, found) + _speed(report)
    titles = {name: ABOUT[name][0] for name in parts}
    html = [
        f"<section id={name}><h2>{escape(titles[name])}</h2><p>{escape(ABOUT[name][1])}</p>{content}</section>"
        for name, content in parts.items()
    ]
    for name, title, content in (("every", "Every measurement", _every(report)), ("papers", "The papers", _papers())):
        titles[name] = title
        html.append(f"<section id={name}><h2>{title}</h2>{content}</section>")
    missing = _missing(report)
    if missing:
        titles["missing"] = "Not measured"
        html.append(f"<section id=missing><h2>Not measured</h2><ul>{missing}</ul></section>")
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title in titles.items())
    return "\n".join([_answer(report), f"<nav aria-label=Contents>{links}</nav>", *html])


# The answer.


def _answer(report: Report) -> str:
    curves = report.curves
    items = [verdict([curve for curve in curves if curve.run is run]) for run in report.runs]
    said = "".join(f"<li><b>{escape(run.label)}</b> {escape(t)}</li>" for run, t in zip(report.runs, items, strict=True))
    records = [one for curve in curves for one in curve.records]
    size = [(run.model.get("layers"), run.model.get("width"), run.model.get("heads")) for run in report.runs]
    facts = [
        "Text " + _few(f"{one.data or 'n.a.'} ({one.split or 'n.a.'})" for one in records),
        "model " + _few(f"{shown(a)} layers × {shown(b)} wide × {shown(c)} heads" for a, b, c in size),
        "steps " + _few(shown(one.step) for one in records),
        "measured " + _few(run.date or "n.a." for run in report.runs),
    ]
    note = "“Holds”: the loss stays within 1 % of its best, in multiples of the training length."
    different = len({(one.data, one.split) for run in report.runs for one in run.evaluations}) > 1
    warning = f"<p class=warning role=note>{escape(OTHER_TEXTS)}</p>" if different else ""
    return f"<ul class=answer>{said}</ul><p class=note>{escape('; '.join(facts))}. {note}</p>{warning}"


def verdict(curves: Sequence[Curve]) -> str:
    """Return in a sentence how far one run holds, under each protocol."""
    first, *others = curves
    words = [_holds(first)]
    for curve in others:
        name = curve.label.removeprefix(curve.run.label).strip(" ·")
        rescued = curve.holds is curve.records[-1] and first.holds is not None and first.holds is not first.records[-1]
        words.append(f"{name} {'rescues it and ' * rescued}{_holds(curve)}")
    return "; ".join(words) + "."


def _holds(curve: Curve) -> str:
    last, holds = curve.records[-1], curve.holds
    if holds is None:
        return "has no finite loss"
    if len(curve.records) == 1:
        return f"was measured at {last.length:,} tokens alone: perplexity {shown(last.perplexity)}"
    ends = f"perplexity {shown(curve.first.perplexity)} at {curve.first.length:,}, {shown(last.perplexity)} at {last.length:,}"
    times = f"{holds.length / curve.run.train_length:.3g} ×"
    return f"holds to {times}, the longest measured ({ends})" if holds is last else f"fails past {times} ({ends})"


def _few(values: Iterable[str]) -> str:
    found = list(dict.fromkeys(values))
    return " / ".join(found[:3]) + f" / {len(found) - 3} more" * (len(found) > 3)


# Pieces.


def table(head: Sequence[str], body: Iterable[Sequence[Any]], summary: str) -> str:
    """Return a folded table that scrolls within itself; the first column heads its rows."""
    cells = "".join(f"<th scope=col{' class=text' * (not i)}>{escape(cell)}</th>" for i, cell in enumerate(head))
    lines = [
        f"<tr><th scope=row class=text>{escape(str(row[0]))}</th>"
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in row[1:])
        + "</tr>"
        for row in body
    ]
    inner = f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    label = escape(summary)
    inside = f'<div class=scroll tabindex=0 role=region aria-label="{label}">{inner}</div>'
    return f"<details><summary>{label}</summary>{inside}</details>"


def _figure(name: str, report: Report, found: Mapping[str, Sequence[Figure]]) -> str:
    if name not in found:
        return ""
    choices = [f"<option value={i}>{escape(figure.title)}</option>" for i, figure in enumerate(found[name])]
    picker = f"<label>Show <select>{''.join(choices)}</select></label>" if len(choices) > 1 else ""
    kind = "maps" if name in ("reach", "distance") else "curves"
    without = "<noscript>The figure needs JavaScript; the tables do not.</noscript>"
    caption = f"<figcaption>{escape(count(report, name))}{escape(' ' + READING) * (name == 'perplexity')}</figcaption>"
    return f'<figure class={kind} data-chart="{name}">{picker}<div class=plot>{without}</div>{caption}</figure>'


def count(report: Report, name: str) -> str:
    """Return n: how many tokens, documents, layers or trials a figure's points are of."""
    records = [one for curve in report.curves for one in curve.records]
    if name in ("perplexity", "speed"):
        tokens, documents = (_few(shown(getattr(one, key)) for one in records) for key in ("tokens", "documents"))
        bars = " Bars are one standard error; where they would hide the curves, only a clicked curve has them."
        return f"n = {tokens} tokens of {documents} documents per point; one run per curve.{bars * (name != 'speed')}"
    found = [row for run in report.runs for row in run.rows(name)]
    if name == "recall":
        return f"n = {_few(shown(row.trials) for row in found)} trials per point; bars are one standard error."
    if name == "positions":
        totals = (sum(c or 0 for c in row.count) if row.count else None for row in found)
        return f"n = {_few(shown(total) for total in totals)} tokens per curve, in buckets; one run per curve."
    layers = {len(row.layers or []) if name == "resolution" else len(getattr(row, WEIGHTS[name])) for row in found}
    what = "curve, a mean over" if name == "resolution" else "map, of"
    longest = "" if name == "resolution" else " The longest length analysed is shown; --csv has all."
    return f"n = 1 checkpoint per {what} {' / '.join(map(str, sorted(layers)))} layers.{longest}"


WEIGHTS = {"reach": "reach", "distance": "weight"}


def _how(content: str) -> str:
    return f"<details class=how><summary>How this was made</summary>{content}</details>"


# Sections.


def _perplexity(report: Report) -> str:
    curves = report.curves
    lengths = sorted({one.length for curve in curves for one in curve.records})
    lines = []
    for curve in curves:
        by = {one.length: plus_minus(one) for one in curve.records}
        lines.append([curve.label, shown(curve.run.train_length), *(by.get(length, "") for length in lengths)])
    head = ["curve", "trained at", *(f"{length:,}" for length in lengths)]
    used = {curve.first.protocol for curve in curves}
    how = "".join(f"<dt>{name}</dt><dd>{escape(PROTOCOLS[name])}</dd>" for name in PROTOCOLS if name in used)
    made = f"<p>{escape(PROTOCOLS[''])}</p><dl>{how}</dl><p>{escape(RELATIVE)}</p>"
    numbers = table(head, lines, "Perplexity per token by length, ± one standard error")
    return _how(made + "".join(map(_measured, curves))) + numbers


def _measured(curve: Curve) -> str:
    devices = ", ".join(sorted({one.device for one in curve.records if one.device}))
    facts = [
        f"{_few(shown(one.tokens) for one in curve.records)} tokens per length",
        f"data {curve.first.data or 'n.a.'}, {curve.first.split or 'n.a.'}",
        f"checkpoint {curve.first.checkpoint or 'n.a.'}",
        f"on {devices or 'n.a.'}",
    ]
    said = next((one.command for one in curve.records if one.command), command(curve))
    return f"<p><b>{escape(curve.label)}</b>: {escape('; '.join(facts))}<br><code>{escape(said)}</code></p>"


def command(curve: Curve) -> str:
    """Return the command that measures a curve; several, where the stride goes with the length in a way of its own."""
    if curve.first.protocol == "sliding" and curve.stride is None and len(curve.records) > 1:
        if not all(2 * (one.stride or 0) == one.length for one in curve.records):  # what `eval` takes itself
            return " && ".join(command(replace(curve, stride=one.stride, records=[one])) for one in curve.records)
    words = ["lengthen", "eval", curve.run.path, "--protocol", curve.first.protocol]
    words += ["--lengths", ",".join(str(one.length) for one in curve.records)]
    tokens = {one.tokens for one in curve.records}
    options = {"--stride": curve.stride, "--block": curve.first.block}
    options |= {"--tokens": tokens.pop() if len(tokens) == 1 else None}
    words += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    if curve.first.split not in (None, "validation"):
        words += ["--split", str(curve.first.split)]
    return shlex.join([*words, "--data", "DATA"])


def _made(report: Report, kind: str) -> str:
    parts = []
    for run in report.runs:
        if kind in run.analyses:
            made = run.analyses[kind]
            data = "" if kind == "recall" else f"; data {made.data or 'n.a.'}"
            said = made.command or analysis_command(run, kind)
            facts = escape(f"checkpoint {made.checkpoint or 'n.a.'}{data}")
            parts.append(f"<p><b>{escape(run.label)}</b>: {facts}<br><code>{escape(said)}</code></p>")
    return _how("".join(parts))


def analysis_command(run: Run, kind: str) -> str:
    """Return the command that makes an analysis: with its lengths, if it was made."""
    words = ["lengthen", "analyse", run.path, "--what", kind]
    found = run.rows(kind)
    lengths = sorted({row.distance if kind == "recall" else row.length for row in found})
    if lengths:
        words += ["--lengths", ",".join(map(str, lengths))]
    if kind == "resolution" and any(row.blockwise for row in found):
        blocks = {row.block for row in found if row.blockwise and row.block}
        words += ["--blockwise", *(part for block in sorted(blocks) for part in ("--block", str(block)))]
    return shlex.join(words if kind == "recall" else [*words, "--data", "DATA"])


def _runs(report: Report) -> str:
    lines = []
    for run in report.runs:
        size = " × ".join(shown(run.model[key]) for key in ("layers", "width", "heads") if key in run.model)
        steps = max((one.step or 0 for one in run.evaluations), default=0)
        speed = shown((run.training or {}).get("tokens_per_second"))
        lines.append([run.label, run.path, shown(run.train_length), size or "n.a.", shown(steps), speed, run.date])
    head = ("method", "run", "trained at", "layers × width × heads", "steps", "training tokens/s", "measured")
    return table(head, lines, "The runs")


def _resolution(report: Report) -> str:
    lines = []
    for run in report.runs:
        for row in run.rows("resolution"):
            block = f"blockwise {row.block or ''}" if row.blockwise else ""
            layers = ", ".join(shown(value, 3) for value in row.layers or [])
            lines.append([run.label, shown(row.length), block, shown(row.resolution, 3), layers])
    return table(("method", "length", "attention", "resolution", "by layer"), lines, "Resolution by length and layer")


def _curse(report: Report) -> str:
    keys = COLUMNS["curse"][-5:]
    lines = [[run.label, *(shown(r[key], 3) for key in keys)] for run in report.runs for r in rows(run, "curse")]
    if not lines:
        return ""
    head = ("method", "short", "long", "gain in loss", "from more context", "from fewer early tokens")
    return f"<p>{escape(CURSE)}</p>{table(head, lines, 'Where the gain of a longer input comes from')}"


def _recall(report: Report) -> str:
    found = {run.label: {row.distance: shown(row.accuracy, 3) for row in run.rows("recall")} for run in report.runs}
    distances = sorted({distance for by in found.values() for distance in by})
    lines = [[label, *(by.get(distance, "") for distance in distances)] for label, by in found.items() if by]
    return table(["method", *(f"{distance:,}" for distance in distances)], lines, "Fraction recalled by distance")


def _speed(report: Report) -> str:
    lines = [
        [curve.label, shown(one.length), shown(one.tokens_per_second), megabytes(one.peak_bytes), one.device or "n.a."]
        for curve in report.curves
        for one in curve.records
    ]
    own = table(("curve", "length", "tokens/s", "peak memory, MB", "device"), lines, "Speed and memory by length")
    head = ("method", "length", "training words/s", "evaluation words/s", "memory, GB")
    keys = ("train_length", "train_words_per_second", "eval_words_per_second", "memory_gb")
    theirs = [[row["method"], *(shown(row[key]) for key in keys)] for row in papers.speed_memory()]
    return own + table(head, theirs, "The ALiBi paper's: table 1, 247M parameters, one V100")


def megabytes(count: Any) -> str:
    """Return a number of bytes in MB, for reading."""
    return "n.a." if finite(count) is None else f"{count / 1e6:,.3g}"


def _every(report: Report) -> str:
    keys = [key for key in COLUMNS["evaluation"] if key not in ("run", "positions", "train_length")]
    lines = []
    for run in report.runs:
        for row in rows(run, "evaluation"):
            values = (row[key] for key in keys)
            lines.append([run.label, *(v if isinstance(v, str) else "" if v is None else shown(v) for v in values)])
    head = ["method", *(key.replace("_", " ") for key in keys)]
    return table(head, lines, f"All {len(lines):,}, other checkpoints included")


def _papers() -> str:
    items = "".join(
        f'<li>{escape(name)}: {escape(title)}, <a href="{escape(link)}" rel=noreferrer>{escape(link)}</a></li>'
        for name, (title, link) in papers.SOURCES.items()
    )
    return f"<p>Their tables are data of the package, measured by their authors on their data.</p><ul>{items}</ul>"


def _missing(report: Report) -> str:
    items = [f"<li>{escape(note)}</li>" for note in report.notes]
    for kind in ("resolution", "positions", "reach", "distance"):  # recall needs a model that was trained on it
        lacking = [run for run in report.runs if kind not in run.analyses]
        lacking = [run for run in lacking if kind != "reach" or "alibi" in run.positions]
        if lacking:
            commands = "<br>".join(f"<code>{escape(analysis_command(run, kind))}</code>" for run in lacking)
            who = escape(", ".join(run.label for run in lacking))
            items.append(f"<li>{escape(ABOUT[kind][0])} of {who}:<br>{commands}</li>")
    return "".join(items)
