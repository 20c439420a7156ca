"""What a page says of a recorded step."""

from dataclasses import replace

from tapas.hardware.mesh import parse_mesh
from tapas.plan.lanes import AHEAD, BEHIND, MOVES
from tapas.report import text_of
from tapas.report.verify import verify_page
from tapas.verify.timeline import Overlap
from tapas.verify.trace import Trace, overlap_dict
from tapas.verify.traffic import SentBytes
from tapas.verify.verification import Check, Report

OVERLAPS = Overlap(MOVES, 2, 3_000, 0.5, 0.0), Overlap(AHEAD, 3, 2_000_000, 0.004, 0.003), Overlap(BEHIND, 0, 0, 0, 0)
SENT = SentBytes("forward", "all_gather", ("tp",), 2_000_000, 2_000_000)
TRACE = Trace("step.json", "cpu", 0.6, OVERLAPS, Overlap("total", 5, 2_003_000, 0.504, 0.003), (OVERLAPS,), (SENT,))
CHECK = Check("losses", {"float64": 0.0, "float32": 0.0, "capture": 0.0}, "step 1", 1)
REPORT = Report("model", parse_mesh("tp=2"), "processes", 1, (CHECK,), {}, (), (9, 9), trace=TRACE)


def shown(report: Report) -> str:
    return text_of(verify_page(report, traced=True), 160)


def test_shares_are_those_of_the_time_under_way() -> None:
    text = shown(REPORT)
    rows = [line.removeprefix(o.role) for line in text.splitlines() for o in OVERLAPS if line.startswith(o.role)]
    assert [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows] == [
        ["2", "3.00 kB", "500 ms", "0", "0%"], ["3", "2.00 MB", "4.00 ms", "3.00 ms", "75%"], ["0", "0", "0", "0"],
    ]  # fmt: skip
    assert "step.json" in text and "On CPUs" in text and "VERIFIED" in text
    assert [overlap_dict(o)["share"] for o in OVERLAPS] == [0, 0.75, None]


def test_devices_are_told_apart() -> None:
    text = shown(replace(REPORT, trace=replace(TRACE, device="cuda")))
    assert "stream of the computation" in text and "On CPUs" not in text


def test_other_bytes_than_predicted_are_not_verified() -> None:
    text = shown(replace(REPORT, trace=replace(TRACE, sent=(replace(SENT, executed_nbytes=1),))))
    assert "Other bytes were sent than predicted: all-gather" in text and "NOT VERIFIED" in text


def test_a_trace_of_what_is_wrong_is_not_there() -> None:
    wrong = replace(REPORT, checks=(replace(CHECK, errors=dict.fromkeys(CHECK.errors, 1.0)),), trace=None)
    assert "No trace was written" in shown(wrong)
    assert "No trace was written" not in text_of(verify_page(wrong), 160)


def test_gradients_that_are_zero_test_little() -> None:
    assert "all gradients of the original are zero" in shown(replace(REPORT, flat=True))
    assert "all gradients" not in shown(REPORT)


def test_the_busiest_rank_is_named() -> None:
    assert "experts over tp: the busiest rank got 1.50 times its share" in shown(replace(REPORT, busiest={"tp": 1.5}))
    assert "the busiest rank" not in shown(REPORT)
