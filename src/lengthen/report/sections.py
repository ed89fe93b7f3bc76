"""The page's body: the answer, a table of contents, and a section per kind of measurement."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lengthen.report import papers
from lengthen.report.charts import Figure, shown
from lengthen.report.collect import Curve, Measurement, Report, Run, finite
from lengthen.report.tables import rows
from lengthen.report.words import ABOUT, HOW, OTHER_TEXTS, PROTOCOLS, READING


def body(report: Report, found: Mapping[str, Sequence[Figure]]) -> str:
    """Return the sections that the runs have numbers for, and what is missing."""
    parts = {"perplexity": _figure("perplexity", report, found) + _perplexity(report)}
    for kind in ("resolution", "positions", "reach", "distance", "recall"):
        if kind in found:
            numbers = "".join(
                _numbers(report, name) for name in {"positions": ["positions", "curse"]}.get(kind, [kind])
            )
            parts[kind] = _figure(kind, report, found) + _made(report, kind) + numbers
    theirs = [[row["method"], *(shown(value) for value in list(row.values())[3:])] for row in papers.speed_memory()]
    head = ("method", "length", "training words/s", "evaluation words/s", "memory, GB")
    parts["speed"] = _figure("speed", report, found) + table(head, theirs, "ALiBi, table 1: 247M parameters, one V100")
    parts["runs"] = _numbers(report, "training") + _numbers(report, "evaluation") + _missing(report)
    links = [f'{name}: {title}, <a href="{link}">{link}</a>' for name, (title, link) in papers.SOURCES.items()]
    parts["papers"] = f"<ul><li>{'<li>'.join(links)}</ul>"
    contents = "".join(f'<a href="#{name}">{escape(ABOUT[name][0])}</a>' for name in parts)
    html = [_answer(report), f"<nav aria-label=Contents>{contents}</nav>"]
    for name, content in parts.items():
        title, about = map(escape, ABOUT[name])
        html.append(f"<section id={name}><h2>{title}</h2><p>{about}</p>{content}</section>")
    return "\n".join(html)


def _answer(report: Report) -> str:
    items = {run.label: verdict([curve for curve in report.curves if curve.run is run]) for run in report.runs}
    said = "".join(f"<li><b>{escape(label)}</b> {escape(words)}" for label, words in items.items())
    records = [one for curve in report.curves for one in curve.records]
    size = ([shown(run.model.get(key)) for key in ("layers", "width", "heads")] for run in report.runs)
    facts = [
        "Text " + _few(f"{one.data or 'n.a.'} ({one.split or 'n.a.'})" for one in records),
        "model " + _few(f"{layers} layers × {width} wide × {heads} heads" for layers, width, heads in size),
        "steps " + _few(shown(one.step) for one in records),
        "measured " + _few(run.date or "n.a." for run in report.runs),
        "“holds”: the loss is within 1 % of its best; × is the training length",
    ]
    different = len({(one.data, one.split) for run in report.runs for one in run.evaluations}) > 1
    warning = f"<p class=warning role=note>{escape(OTHER_TEXTS)}</p>" if different else ""
    return f"<ul class=answer>{said}</ul><p class=note>{escape('; '.join(facts))}.</p>{warning}"


def verdict(curves: Sequence[Curve]) -> str:
    """Return in a sentence how far one run holds, under each protocol."""
    first, *others = curves
    words = [_holds(first)]
    for curve in others:
        name = curve.label.removeprefix(curve.run.label).strip(" ·")
        if first.holds not in (None, first.records[-1]) and curve.holds is curve.records[-1]:
            words.append(f"{name} rescues it, to {_times(curve)} ({shown(curve.records[-1].perplexity)})")
        else:
            words.append(f"{name} {_holds(curve)}")
    return "; ".join(words) + "."


def _holds(curve: Curve) -> str:
    last = curve.records[-1]
    if curve.holds is None:
        return "has no finite loss"
    if len(curve.records) == 1:
        return f"was measured at {last.length:,} tokens alone: perplexity {shown(last.perplexity)}"
    ends = " → ".join(f"{shown(one.perplexity)} at {one.length:,}" for one in (curve.first, last))
    return f"{'holds to' if curve.holds is last else 'fails past'} {_times(curve)} (perplexity {ends})"


def _times(curve: Curve) -> str:
    return f"{curve.holds.length / curve.run.train_length:.3g} ×" if curve.holds else "n.a."


def _few(values: Iterable[str]) -> str:
    found = list(dict.fromkeys(values))
    return " / ".join(found[:3]) + f" / {len(found) - 3} more" * (len(found) > 3)


def _figure(name: str, report: Report, found: Mapping[str, Sequence[Figure]]) -> str:
    if name not in found:
        return ""
    choices = [f"<option value={i}>{escape(figure.title)}</option>" for i, figure in enumerate(found[name])]
    picker = f"<label>Show <select>{''.join(choices)}</select></label>" if len(choices) > 1 else ""
    kind = "maps" if name in ("reach", "distance") else "curves"
    without = "<noscript>The figure needs JavaScript; the tables do not.</noscript>"
    caption = escape(count(report, name) + f" {READING}" * (name == "perplexity"))
    plot = f"<div class=plot>{without}</div><figcaption>{caption}</figcaption>"
    return f"<figure class={kind} data-chart={name}>{picker}{plot}</figure>"


def count(report: Report, name: str) -> str:
    """Return n: how many tokens, documents, layers or trials a figure's points are of."""
    if name in ("perplexity", "speed"):
        records = [one for curve in report.curves for one in curve.records]
        tokens, documents = (_few(shown(getattr(one, key)) for one in records) for key in ("tokens", "documents"))
        bars = " Bars are one standard error; where they would hide the curves, only a clicked curve has them."
        return f"n = {tokens} tokens of {documents} documents per point; one run per curve.{bars * (name != 'speed')}"
    found = [row for run in report.runs for row in run.rows(name)]
    if name == "recall":
        return f"n = {_few(shown(row['trials']) for row in found)} trials per point; bars are one standard error."
    if name == "positions":
        return f"n = {shown(sum(row['count'] or 0 for row in found))} tokens in all; one run per curve."
    layers = len({row["layer"] for row in found} - {None})
    longest = " The longest length analysed is shown." * (name != "resolution")
    return f"n = 1 checkpoint per {'curve' if name == 'resolution' else 'map'}, {layers} layers.{longest}"


def table(head: Sequence[str], body: Iterable[Sequence[Any]], summary: str) -> str:
    """Return a folded table that scrolls within itself; the first column heads its rows."""
    cells = "".join(f"<th scope=col>{escape(cell)}" for cell in head)
    lines = (
        f"<tr><th scope=row>{escape(str(row[0]))}" + "".join(f"<td>{escape(str(cell))}" for cell in row[1:])
        for row in body
    )
    inner = f"<table><thead><tr>{cells}<tbody>{''.join(lines)}</table>"
    label = escape(summary)
    scroll = f'<div class=scroll tabindex=0 role=region aria-label="{label}">{inner}</div>'
    return f"<details><summary>{label}</summary>{scroll}</details>"


def _numbers(report: Report, name: str) -> str:
    found = [{"run": run.label, **row} for run in report.runs for row in rows(run, name)]
    if not found:
        return ""
    lines = ([v if isinstance(v, str) else "" if v is None else shown(v) for v in row.values()] for row in found)
    return table([key.replace("_", " ") for key in found[0]], lines, f"Numbers: {name}, {len(found):,} rows")


def _perplexity(report: Report) -> str:
    lengths = sorted({one.length for curve in report.curves for one in curve.records})
    by = {curve.label: {one.length: plus_minus(one) for one in curve.records} for curve in report.curves}
    lines = [[label, *(values.get(length, "") for length in lengths)] for label, values in by.items()]
    numbers = table(
        ["curve", *(f"{n:,}" for n in lengths)], lines, "Perplexity per token by length, ± one standard error"
    )
    used = {curve.first.protocol for curve in report.curves}
    terms = "".join(f"<dt>{name}<dd>{PROTOCOLS[name]}" for name in PROTOCOLS if name in used)
    parts = []
    for curve in report.curves:
        one, devices = curve.first, ", ".join(sorted({one.device for one in curve.records if one.device}))
        facts = [f"{_few(shown(one.tokens) for one in curve.records)} tokens per length", f"data {one.data or 'n.a.'}"]
        facts += [one.split or "n.a.", f"checkpoint {one.checkpoint or 'n.a.'}", f"on {devices or 'n.a.'}"]
        parts.append(_source(curve.label, ", ".join(facts), one.command or command(curve)))
    return _how(f"<p>{HOW}</p><dl>{terms}</dl>{''.join(parts)}") + numbers


def plus_minus(one: Measurement) -> str:
    """Return a perplexity with its standard error, to first order perplexity × that of the loss."""
    value, error = one.perplexity, finite(one.loss_se)
    return (
        shown(value) if finite(value) is None or error is None else f"{shown(value)} ± {shown((value or 0) * error, 2)}"
    )


def _made(report: Report, kind: str) -> str:
    made = [(run, run.analyses[kind]) for run in report.runs if kind in run.analyses]
    facts = (f"checkpoint {one.checkpoint or 'n.a.'}, data {one.data or 'n.a.'}" for _, one in made)
    said = (one.command or analysis_command(run, kind) for run, one in made)
    labels = (run.label for run, _ in made)
    return _how("".join(map(_source, labels, facts, said)))


def _source(label: str, facts: str, command: str) -> str:
    return f"<p><b>{escape(label)}</b>: {escape(facts)}<br><code>{escape(command)}</code></p>"


def _how(content: str) -> str:
    return f"<details class=how><summary>How this was made</summary>{content}</details>"


def command(curve: Curve) -> str:
    """Return the command that measures a curve."""
    words = ["lengthen", "eval", curve.run.path, "--protocol", curve.first.protocol]
    words += ["--lengths", ",".join(str(one.length) for one in curve.records)]
    tokens = {one.tokens for one in curve.records}
    options: dict[str, Any] = {"--block": curve.first.block, "--tokens": tokens.pop() if len(tokens) == 1 else None}
    if curve.first.protocol == "sliding" and "length/2" not in curve.first.how:
        options["--stride"] = curve.first.stride
    options["--split"] = None if curve.first.split == "validation" else curve.first.split
    words += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return shlex.join([*words, "--data", "DATA"])


def analysis_command(run: Run, kind: str) -> str:
    """Return the command that makes an analysis: with its lengths, if it was made."""
    words = ["lengthen", "analyse", run.path, "--what", kind]
    lengths = sorted({row["distance" if kind == "recall" else "length"] for row in run.rows(kind)})
    words += ["--lengths", ",".join(map(str, lengths))] if lengths else []
    blocks = {row["block"] for row in run.rows(kind) if row.get("blockwise")}
    words += ["--blockwise"] if blocks else []
    words += [word for block in blocks if block for word in ("--block", str(block))]
    return shlex.join(words if kind == "recall" else [*words, "--data", "DATA"])


def _missing(report: Report) -> str:
    items = [escape(note) for note in report.notes]
    for kind in ("resolution", "positions", "reach", "distance"):  # recall needs a model that was trained on it
        for run in report.runs:
            if kind not in run.analyses and (kind != "reach" or "alibi" in run.positions):
                items.append(f"{ABOUT[kind][0]}: <code>{escape(analysis_command(run, kind))}</code>")
    return (
        f"<details id=missing><summary>Not measured</summary><ul><li>{'<li>'.join(items)}</ul></details>"
        if items
        else ""
    )
