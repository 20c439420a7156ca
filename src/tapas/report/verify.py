"""What a verification found as a page: a table of errors, a table of what was sent, and a verdict."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tapas.report import units
from tapas.report.frame import Cell, line, page, table
from tapas.rules.matmul import IMBALANCE
from tapas.verify.judge import TOLERANCE
from tapas.verify.timeline import Overlap
from tapas.verify.trace import Trace, share
from tapas.verify.verification import Check, Report

_WORDS = {
    "all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "halo": "halo exchange",
}  # fmt: skip


def _verdict(ok: bool) -> Text:
    return Text("ok", "green") if ok else Text("WRONG", "bold red")


def _checks(report: Report) -> Table:
    def row(check: Check) -> tuple[Cell, ...]:
        many = f" ({check.compared})" if check.compared > 1 else ""
        errors = [f"{check.errors[p]:.1e}" for p in TOLERANCE]
        return (check.what + many, *errors, _verdict(check.ok), check.where)

    columns = ("!what", ">float64 error", ">float32 error", ">capture error", "!verdict", "largest error at")
    limits = ("allowed", *(f"{most:.0e}" for most in TOLERANCE.values()), "", "")
    title = "Parallel program against the original (relative errors)"
    return table(title, columns, [*map(row, report.checks), ("-",), limits])


def _sent(report: Report) -> Table | Text:
    rows: list[tuple[Cell, ...]] = []
    for precision, sent in report.sent.items():
        for s in sent:
            figures = units.nbytes(s.predicted_nbytes), units.nbytes(s.executed_nbytes)
            if not s.ok:
                figures = f"{s.predicted_nbytes:,} B", f"{s.executed_nbytes:,} B"
            where = f"{_WORDS.get(s.kind, s.kind)} over {' and '.join(s.axes)}"
            rows.append((where, s.phase, precision, *figures, _verdict(s.ok)))
    if not rows:
        return Text("Nothing is sent, as planned")
    columns = ("!collective", "phase", "precision", ">predicted", ">sent", "!verdict")
    return table("Sent in one step (the rank that sends most)", columns, rows)


def _launched(report: Report) -> Text | None:
    """The same in all precisions, unless something is wrong."""
    some = next((s for s in report.launched.values() if not s.ok), next(iter(report.launched.values()), None))
    if some is None or not (some.messages or some.predicted_messages):
        return None
    strided = f"; {some.strided} tensors have strides of their own" if some.strided else ""
    text = (
        f"Messages in one step: {some.messages} ({some.predicted_messages} planned), copies into their buffers and out"
        f" of them: {some.copies} ({some.predicted_copies} planned{strided})  "
    )
    return Text.assemble(text, _verdict(some.ok))


def _memory(report: Report) -> Text | None:
    measured = {p: used for p, used in report.memory.items() if used.measured_nbytes}
    if not measured:
        return None
    texts = [
        f"{units.nbytes(used.measured_nbytes)} in {p} ({units.nbytes(used.predicted_nbytes)} predicted,"
        f" {used.predicted_nbytes / used.measured_nbytes - 1:+.0%})"
        for p, used in measured.items()
    ]
    return line("Memory at its peak, on the rank that needs most: ", ", ".join(texts))


def _overlap(trace: Trace) -> Table:
    """How much of the time in which something was under way the rank computed."""

    def row(overlap: Overlap) -> tuple[Cell, ...]:
        part = share(overlap)
        hidden = units.percent(part) if part is not None else ""
        times = units.seconds(overlap.seconds), units.seconds(overlap.hidden)
        return (overlap.role, str(overlap.collectives), units.nbytes(overlap.nbytes), *times, hidden)

    columns = ("!what", ">collectives", ">bytes", ">under way", ">hidden", ">share")
    title = f"Sent and hidden in a recorded step of {units.seconds(trace.seconds)} (per rank)"
    return table(title, columns, [*map(row, trace.overlaps), ("-",), row(trace.total)])


def _traced(report: Report, wanted: bool) -> list[RenderableType]:
    trace = report.trace
    if trace is None:
        return [line(("No trace was written: ", "yellow"), "the program is not the original")] if wanted else []
    what = "while an operator ran, and nobody waited"
    if trace.device == "cuda":
        what = "while the stream of the computation was busy"
    words = [f"Hidden is what was under way {what}; what is under way twice counts once in the total."]
    if trace.device == "cpu":
        words.append("On CPUs those who send take the time of those who compute.")
    if wrong := [s for s in trace.sent if not s.ok]:
        kinds = ", ".join(_WORDS.get(s.kind, s.kind) for s in wrong)
        words.append(f"Other bytes were sent than predicted: {kinds}.")
    written = line("Trace: ", (trace.path, "bold"), ", one process per rank, for ui.perfetto.dev")
    return [_overlap(trace), line(" ".join(words)), written]


def _notes(report: Report) -> list[Text]:
    got = "Tokens sent to experts over {}: the busiest rank got {:.2f} times its share, {} is planned"
    found = [line(got.format(axis, ratio, IMBALANCE)) for axis, ratio in report.busiest.items()]
    if report.silenced:
        some = ", ".join(report.silenced[:3]) + (", ..." if len(report.silenced) > 3 else "")
        found.append(line(f"Dropout was set to zero for the comparison in {len(report.silenced)} places: {some}"))
    if report.little:
        found.append(_untested(report))
    if report.flat:
        found.append(line(("Little was tested: all gradients of the original are zero. ", "yellow"),
                          "Use inputs, labels or weights for which it has something to learn"))  # fmt: skip
    return found


def _untested(report: Report) -> Text:
    split, total = report.split
    remedy = "Use a larger model to check more"
    if report.advice is not None:
        remedy = f"--pin '{report.advice.pin}' splits {report.advice.split[0]} of them: use it to check more"
    return line((f"Little was tested: {split} of {total} operators are split. ", "yellow"), remedy)


def _culprit(report: Report) -> Text | None:
    found = report.culprit
    if found is None:
        return None if all(c.ok for c in report.checks) else line("No single operator differs when ranks are threads")
    what = {"forward": "result", "backward": "gradient"}.get(found.phase, found.phase)
    return line(
        ("First difference: ", "bold red"), f"the {what} of {found.operator} ({found.target})",
        f" in {found.module or 'the model'}, laid out as [{found.layout}], relative error {found.error:.1e}",
    )  # fmt: skip


def _last(report: Report) -> Text:
    split, total = report.split
    where = f"{report.model} on {report.mesh}, {report.mesh.devices} {report.how}, {split} of {total} operators split"
    if report.ok:
        verdict = ("VERIFIED IN PART", "bold yellow") if report.little else ("VERIFIED", "bold green")
        return line(verdict, f"  {where}: it computes what the original computes, and sends what was predicted")
    wrong = [c.what for c in report.checks if not c.ok]
    sent = [*report.sent.values(), report.trace.sent if report.trace is not None else ()]
    wrong += ["collectives"] if any(not s.ok for some in sent for s in some) else []
    wrong += ["messages or copies"] if any(not some.ok for some in report.launched.values()) else []
    return line(("NOT VERIFIED", "bold red"), f"  {where}: {', '.join(wrong)} differ")


def verify_page(report: Report, traced: bool = False) -> Group:
    """`traced`: a trace was asked for."""
    parts = _checks(report), _sent(report), _launched(report), _memory(report), *_traced(report, traced)
    return page((*parts, *_notes(report), _culprit(report), _last(report)))
