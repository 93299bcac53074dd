"""The table, the files and the picture of a measurement."""

import csv
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from shmserve import cli
from shmserve.cli import perf
from shmserve.errors import InvalidArgument, Unavailable
from shmserve.perf import measure, report, targets
from shmserve.perf.measure import Point

LATENCY = {"mean": 2.0, "p50": 1.5, "p90": 3.0, "p95": 4.0, "p99": 5.0, "p99.9": 6.0, "max": 9.0}
SERVER = {"queue": 100.0, "compute_input": 10.0, "compute_infer": 500.0, "compute_output": 20.0}
POINT = Point(
    *("concurrency", 4.0, 6000, 0, "", 3.0, 2000.0, 20.0, True, LATENCY, LATENCY, 30.0, 0.06, 0.5),
    server={"m": {**SERVER, "batch": 2.5}},
)


def test_the_table_attributes_the_time() -> None:
    head, row, _, _, server = report.format_table([POINT]).splitlines()
    assert head.split()[:3] == ["load", "requests/s", "±"]
    assert row.split()[:6] == ["concurrency", "4", "2,000.0", "1.0%", "2.000", "1.500"]
    # The client's waiting time includes a part that the server does not count.
    assert server.split()[-6:] == ["100.0", "10.0", "500.0", "20.0", "1370.0", "2.50"]


def test_the_report_warns_of_unreliable_figures() -> None:
    assert report.notes(POINT) == []
    unreliable = replace(POINT, kind="rate", value=4000.0, settled=False, errors=3, error="no")
    text = "; ".join(report.notes(replace(unreliable, client_busy=0.95)))
    assert "differ" in text and "3 requests failed; mostly: no" in text
    assert "load generator was CPU-bound" in text and "did not keep up" in text


def test_random_variation_is_not_reported_as_overload() -> None:
    assert report.notes(replace(POINT, kind="rate", value=2020.0)) == []


def test_a_report_is_read_back_and_compared(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(report.as_json({"model": "m"}, [POINT]))
    assert report.read_report(str(path)) == [POINT]
    new = replace(POINT, per_second=3000.0)
    assert report.comparison([POINT], [new]).splitlines()[1].split()[2:4] == ["1.500", "1.000"]
    assert "~1.015" in report.comparison([POINT], [replace(POINT, per_second=2030.0)])
    assert "~1.500" in report.comparison([replace(POINT, confidence=None)], [new])
    assert "none of these" in report.comparison([POINT], [replace(POINT, value=8.0)])


def test_the_loads_before_a_failure_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(perf, "_measure", Mock(side_effect=[POINT, Unavailable("it is gone")]))
    monkeypatch.setattr(targets, "connect", Mock(return_value=Mock(title="a server")))
    path = tmp_path / "report.json"
    assert cli.main(["perf", "m", "--concurrency=4,8", f"--json={path}"]) == 1
    assert [point["value"] for point in json.loads(path.read_text())["points"]] == [4.0]
    captured = capsys.readouterr()
    assert "concurrency 4 " in captured.out and captured.err == "shmserve: it is gone\n"


def test_a_single_window_has_no_confidence_interval(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    point = replace(POINT, confidence=None)
    path.write_text(report.as_json({}, [point]))
    assert (
        json.loads(path.read_text(), parse_constant=pytest.fail)["points"][0]["confidence"] is None
    )
    assert report.read_report(str(path)) == [point]
    assert report.format_table([point]).splitlines()[1].split()[3] == "-"


@pytest.mark.parametrize(
    "text", ["", "{}", '{"format": 2, "points": []}', '{"format": 1, "points": [3]}']
)
def test_an_invalid_report_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="--compare: "):
        report.read_report(str(path))


def test_csv_has_one_line_per_load() -> None:
    rows = list(csv.DictReader(report.as_csv([POINT, replace(POINT, value=8.0)]).splitlines()))
    assert [row["value"] for row in rows] == ["4.0", "8.0"]
    assert (rows[0]["latency.p99"], rows[0]["server.m.queue"]) == ("5.0", "100.0")


@pytest.mark.parametrize("values", [[4.0], [1.0, 4.0, 16.0]])
def test_the_picture_is_svg(values: list[float]) -> None:
    points = [replace(POINT, value=value, per_second=500 * value) for value in values]
    root = ET.fromstring(report.draw("<m> & n", points))
    assert root.tag.endswith("svg")
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert texts[0].startswith("<m> & n")
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == (5 if len(values) == 1 else 9)


def test_server_counts_are_differences() -> None:
    def stats(count: int, ns: int, execution_count: int) -> dict[str, object]:
        durations = {"count": count, "ns": ns}
        return {
            "inference_count": 2 * count,
            "execution_count": str(execution_count),  # gRPC's JSON has strings for int64
            "inference_stats": {
                "success": durations,
                "queue": durations,
                "compute_infer": durations,
            },
        }

    growth = measure.statistics_change(stats(10, 1_000_000, 5), stats(30, 3_000_000, 15))
    assert growth["queue"] == growth["compute_infer"] == 100.0
    assert (growth["compute_input"], growth["batch"], growth["requests"]) == (0.0, 4.0, 20)
    assert measure.statistics_change(stats(10, 0, 5), stats(10, 0, 5)) == {}
    assert json.dumps(growth)
