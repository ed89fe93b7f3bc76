"""The page's body: the answer, a table of contents, and a section per kind of measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lengthen.evaluation.verdict import Verdict
from lengthen.report import papers
from lengthen.report.analyses import KINDS
from lengthen.report.charts import Figure, shown
from lengthen.report.collect import Curve, Measurement, Report, finite, paired
from lengthen.report.tables import rows
from lengthen.report.words import ABOUT, HOW, OTHER_TEXTS, PROTOCOLS, READING

NOTHING = "but it has learned nothing: tokens’ frequencies alone predict as well"


def body(report: Report, found: Mapping[str, Sequence[Figure]]) -> str:
    """Return the sections that the runs have numbers for."""
    parts = {"perplexity": _figure("perplexity", report, found) + _perplexity(report)}
    for kind in KINDS:
        if kind in found:
            parts[kind] = _figure(kind, report, found) + _numbers(report, kind)
    for name in ("tasks", "depths"):
        if name in found:
            parts[name] = _figure(name, report, found) + _numbers(report, "tasks") * (name == "tasks")
    if "positions" in parts:
        parts["positions"] += _numbers(report, "curse")
    theirs = [[row["method"], *(shown(value) for value in list(row.values())[3:])] for row in papers.speed_memory()]
    head = ("method", "length", "training words/s", "evaluation words/s", "memory, GB")
    parts["speed"] = _figure("speed", report, found) + table(head, theirs, "ALiBi, table 1: 247M parameters, one V100")
    left_out = "".join(f"<li>Left out: {escape(note)}" for note in report.notes)
    parts["runs"] = _numbers(report, "evaluation") + f"<ul>{left_out}</ul>" * bool(left_out)
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
        f"Measured {_few(run.date for run in report.runs)} on {_text(report)}",
        "models of " + _few(f"{layers} layers × {width} wide × {heads} heads" for layers, width, heads in size),
        f"trained for {_few(shown(one.step) for one in records)} steps",
        "“holds”: perplexity is at most 2 % above that at the training length, over the same tokens; × is that length",
    ]
    warning = f"<p class=warning role=note>{escape(OTHER_TEXTS)}</p>" if len(report.texts) > 1 else ""
    return f"<ul class=answer>{said}</ul><p class=note>{escape('; '.join(facts))}.</p>{warning}"


def verdict(curves: Sequence[Curve]) -> str:
    """Return in a sentence how far one run holds, under each protocol."""
    first, *others = curves
    words = [_holds(first)]
    for curve in others:
        name = curve.label.removeprefix(curve.run.label).strip(" ·")
        fails = first.verdict is not None and not first.verdict.holds
        same = curve.first.text == first.first.text
        if fails and same and curve.verdict is not None and curve.verdict.holds:
            words.append(f"{name} rescues it, to {_times(curve.verdict)} ({shown(curve.records[-1].perplexity)})")
        else:
            words.append(f"{name} {_holds(curve)}")
    return "; ".join(words) + "."


def _holds(curve: Curve) -> str:
    last, found = curve.records[-1], curve.verdict
    if all(finite(one.loss) is None for one in curve.records):
        return "has no finite loss"
    nothing = "" if found is None or found.learned else f", {NOTHING}"
    if len(curve.records) == 1:
        return f"was measured at {last.length:,} tokens alone: perplexity {shown(last.perplexity)}{nothing}"
    if found is None:
        problem = "has no finite loss" if curve.reference else "was not measured"
        return f"{problem} at its training length of {curve.run.train_length:,}"
    how = "holds to" if found.holds else "fails past"
    start = f"perplexity {shown(found.reference.perplexity)} at {found.reference.length:,}"
    return f"{how} {_times(found)} ({start}, {found.change} at {found.at:,}){nothing}"


def _times(found: Verdict[Measurement]) -> str:
    return f"{found.times:.3g} ×"


def _few(values: Iterable[str]) -> str:
    found = list(dict.fromkeys(values))
    return " / ".join(found[:3]) + f" / {len(found) - 3} more" * (len(found) > 3)


def _text(report: Report) -> str:
    records = [one for curve in report.curves for one in curve.records]
    tokens, documents = (_few(shown(getattr(one, key)) for one in records) for key in ("tokens", "documents"))
    return f"{tokens} tokens of {documents} documents ({_few(one.split or 'n.a.' for one in records)})"


def _figure(name: str, report: Report, found: Mapping[str, Sequence[Figure]]) -> str:
    if name not in found:
        return ""
    choices = [f"<option value={i}>{escape(figure.title)}</option>" for i, figure in enumerate(found[name])]
    picker = f"<label>Show <select>{''.join(choices)}</select></label>" if len(choices) > 1 else ""
    plot = "<div class=plot><noscript>The figure needs JavaScript; the tables do not.</noscript></div>"
    caption = escape(count(report, name) + f" {READING}" * (name == "perplexity")) + _made(report, name)
    kind = "maps" if name in ("reach", "distance", "depths") else "curves"
    return f"<figure class={kind} data-chart={name}>{picker}{plot}<figcaption>{caption}</figcaption></figure>"


def count(report: Report, name: str) -> str:
    """Return n: how many tokens, documents, layers or trials a figure's points are of."""
    bars = "Bars are one standard error"
    found = [row for run in report.runs for row in run.rows(name)]
    layers = len({row.get("layer") for row in found} - {None})
    if name in ("perplexity", "speed"):
        return (
            f"n = {_text(report)} per point; one run per curve."
            + f" {bars} of the change from the training length." * (name == "perplexity")
        )
    if name in ("tasks", "depths"):
        asked = [one for run in report.runs for one in run.tasks]
        samples = _few(shown(n) for one in asked for n in (one.counts if name == "depths" else [sum(one.counts)]))
        return f"n = {samples} samples per " + ("point, by the binomial. " + bars if name == "tasks" else "cell") + "."
    if name == "induction":
        sequences = _few(shown(row["sequences"]) for row in found if row["layer"] is None)
        return f"n = {sequences} sequences per point. {bars}."
    if name == "longppl":
        return f"n = {_few(shown(row['key_tokens']) for row in found)} key tokens per point. {bars}."
    if name == "positions":
        return f"n = {shown(sum(row['count'] or 0 for row in found))} tokens in all; one run per curve."
    if name == "resolution":
        return f"n = 1 checkpoint per curve, {layers} layers."
    return f"n = 1 checkpoint per map, {layers} layers. The longest length analysed is shown."


def _made(report: Report, name: str) -> str:
    """Return the command that makes a figure's numbers, and what they were made from."""
    kind = {"perplexity": "evaluation", "speed": "evaluation", "depths": "tasks"}.get(name, name)
    found = [row for run in report.runs for row in rows(run, kind)]
    names = {key: key for key in ("checkpoint", "data", "device", "precision")} | {"version": "lengthen"}
    told = {key: _few(row.get(key) or "n.a." for row in found) for key in names}
    facts = (f"{name} {told[key]}" for key, name in names.items() if told[key] != "n.a.")
    commands = {"evaluation": "lengthen eval RUN", "tasks": "lengthen eval RUN --task TASK"}
    command = commands.get(kind, f"lengthen analyse RUN --what {name}")
    return f"<br>Made by <code>{command}</code>: {escape(', '.join(facts))}."


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
    lines = [
        ["" if value is None else shown(value) if type(value) in (int, float) else str(value) for value in row.values()]
        for row in found
    ]
    head = [key.replace("_", " ") for key in (found or [{}])[0]]
    return table(head, lines, f"Numbers: {name}, {len(found):,} rows") if found else ""


def _perplexity(report: Report) -> str:
    used = {curve.first.protocol for curve in report.curves}
    terms = "".join(f"<dt>{name}<dd>{PROTOCOLS[name]}" for name in PROTOCOLS if name in used)
    how = f"<details><summary>How perplexity is measured</summary><p>{HOW}</p><dl>{terms}</dl></details>"
    first = report.curves[0]
    alone = "Perplexity per token by length, and its change from the training length ± one standard error"
    beside = f"Difference of perplexity from {first.label} at the same length ± one standard error"
    between = {
        curve.label: {one.length: difference(one, first) for one in curve.records} for curve in report.curves[1:]
    }
    differing = any(value for values in between.values() for value in values.values())
    values = {curve.label: {one.length: changed(curve, one) for one in curve.records} for curve in report.curves}
    return how + _by_length(values, alone) + (_by_length(between, beside) if differing else "")


def _by_length(values: Mapping[str, Mapping[int, str]], summary: str) -> str:
    lengths = sorted({length for row in values.values() for length in row})
    lines = [[label, *(row.get(length, "") for length in lengths)] for label, row in values.items()]
    return table(["curve", *(f"{length:,}" for length in lengths)], lines, summary)


def changed(curve: Curve, one: Measurement) -> str:
    """Return a perplexity, and how it differs from that at the training length."""
    change = curve.change(one)
    return shown(one.perplexity) + ("" if change is None else f" ({change})")


def difference(one: Measurement, first: Curve) -> str:
    """Return how a perplexity differs from another curve's at the same length, if that is of the same tokens."""
    other = next((other for other in first.records if other.length == one.length), None)
    found = paired(one, other) if other is not None else None
    return "" if found is None else str(found)
