from __future__ import annotations

import json
import random

import numpy as np
import pytest
from scipy import stats

from mergelab import records
from mergelab.errors import DamagedFileError
from mergelab.report.rows import COLUMNS, rows
from mergelab.report.statistics import paired_interval
from mergelab.report.table import to_csv, to_markdown, write_report
from tests.report.run_folders import TEXT, VISION, PointMaker, samples, scores, usual_points, write_run

DESIGN_COLUMNS = (
    "point_id, role, method, parameters, seed, zero_point, conventions, sink_strength, sink_strength_bf16, "
    "task, modality, reference, protocol, n, strict, flexible, base_strict, vlm_strict, delta_vlm, "
    "delta_vlm_low, delta_vlm_high, delta_base, ci_low, ci_high, margin, alpha, mde, recovery, truncated, "
    "empty, unparsable, verdict, overall"
)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("usual") / "run", usual_points())


def row_of(found, point_id, task=TEXT):
    (row,) = [row for row in found if row.point_id == point_id and row.task == task]
    return row


def text_run(tmp_path, merge, base=None, vlm=None, **options):
    points = [
        PointMaker("base", text=base or scores(570, 30)),
        PointMaker("vlm", text=vlm or scores(210, 390)),
        PointMaker("merge", text=merge, method="linear"),
    ]
    return write_run(tmp_path / "run", points, **options)


def rewrite(run, point_id, task, change):
    record = next(point for point in run.points if point.point_id == point_id).tasks[task]
    lines = [dict(line) for line in record.samples]
    change(lines)
    records.write_task(run.folder, point_id, task, record.metrics, lines)
    return records.read_run(run.folder)


def test_columns_are_those_of_the_run_folder_format(usual):
    assert ", ".join(COLUMNS) == DESIGN_COLUMNS
    assert to_csv(rows(usual)).splitlines()[0] == DESIGN_COLUMNS.replace(" ", "")


def test_one_row_for_each_point_and_task_parents_and_controls_too(usual):
    found = rows(usual)
    assert [(row.role, row.task) for row in found].count(("base", TEXT)) == 1
    assert len(found) == 9 + 7
    assert {row.role for row in found} == {"base", "ancestor", "vlm", "control", "merge"}


@pytest.mark.parametrize(
    ("point_id", "text", "vision", "overall"),
    [
        ("control-copy-ofbase", "restored", "lost", "restored, pictures lost"),
        ("control-copy-ofvlm", "fails to restore", "retained", "fails to restore"),
        ("control-gaussian-scale1.0-seed0", "partly restored", "lost", "partly restored, pictures lost"),
        ("merge-ties-density0.2-lambda0.5", "restored", "retained", "restored"),
        ("merge-ties-density0.5-lambda0.5", "partly restored", "lost", "partly restored, pictures lost"),
        ("merge-ties-density0.2-lambda1.0", "harms", "inconclusive", "harms"),
    ],
)
def test_verdicts_of_the_usual_run(usual, point_id, text, vision, overall):
    found = rows(usual)
    assert row_of(found, point_id).verdict == text
    assert row_of(found, point_id, VISION).verdict == vision
    assert {row.overall for row in found if row.point_id == point_id} == {overall}


def test_parents_have_differences_and_no_verdict(usual):
    found = rows(usual)
    base, vlm = row_of(found, "base"), row_of(found, "vlm")
    assert (base.strict, base.base_strict, base.vlm_strict, base.delta_vlm) == (95, 95, 35, 60)
    assert base.delta_base is None and vlm.delta_vlm is None and vlm.delta_base == -60
    assert row_of(found, "ancestor").delta_base == -95
    assert {row.verdict + row.overall for row in found if row.role in ("base", "ancestor", "vlm")} == {""}


def test_picture_rows_have_no_base_cells(usual):
    row = row_of(rows(usual), "merge-ties-density0.5-lambda0.5", VISION)
    assert row.reference == "vlm" and row.vlm_strict == 100 and row.delta_vlm == -10
    assert [row.base_strict, row.delta_base, row.ci_low, row.ci_high, row.recovery] == [None] * 5


def test_a_base_that_guesses_pictures_is_no_reference_for_them(tmp_path):
    points = usual_points()
    points[0].vision = scores(60, 180)
    run = write_run(tmp_path / "run", points)
    row = row_of(rows(run), "merge-ties-density0.5-lambda0.5", VISION)
    assert [row.base_strict, row.delta_base, row.ci_low, row.ci_high, row.recovery] == [None] * 5


def test_text_row_closes_arithmetically(usual):
    row = row_of(rows(usual), "merge-ties-density0.5-lambda0.5")
    assert row.delta_base == row.strict - row.base_strict == -45
    assert row.delta_vlm == row.strict - row.vlm_strict == 15
    assert row.recovery == 0.25 and row.recovery_low < 0.25 < row.recovery_high
    assert row.ci_low < row.delta_base < row.ci_high and row.n == 600
    assert row.mde == pytest.approx(280.16 * (0.45 / 600) ** 0.5, abs=0.01)


def test_without_a_gap_there_is_no_ratio(tmp_path):
    base = scores(570, 30)
    run = text_run(tmp_path, merge=scores(300, 300), base=base, vlm=base)
    row = row_of(rows(run), "merge-linear")
    assert row.verdict == "no gap" and row.recovery is None
    assert "nan" not in to_csv(rows(run))


def test_unresolved_gap_is_inconclusive_without_ratio(tmp_path):
    run = text_run(tmp_path, merge=scores(300, 300), base=scores(570, 30), vlm=scores(556, 44))
    row = row_of(rows(run), "merge-linear")
    assert row.verdict == "inconclusive" and row.recovery is None and row.mde > 0


def test_pairs_are_documents_and_not_lines(tmp_path):
    run = text_run(tmp_path, merge=scores(570, 30))
    before = rows(run)
    assert rows(rewrite(run, "merge-linear", TEXT, list.reverse)) == before


@pytest.mark.parametrize("name", ["doc_hash", "prompt_hash", "target_hash"])
def test_other_documents_are_refused_naming_the_first(tmp_path, name):
    def change(lines):
        for line in lines[7:9]:
            line[name] = "changed"

    run = rewrite(text_run(tmp_path, merge=scores(570, 30)), "merge-linear", TEXT, change)
    with pytest.raises(DamagedFileError, match=rf"document 7, {name}.*changed") as caught:
        rows(run)
    assert "merge-linear" in str(caught.value) and "vlm" not in str(caught.value)


def test_other_subsets_are_refused_naming_the_first(tmp_path):
    run = rewrite(text_run(tmp_path, merge=scores(570, 30)), "merge-linear", TEXT, lambda lines: lines.pop(11))
    with pytest.raises(DamagedFileError, match=r"document 11 stands in only one.*(599 and 600|600 and 599)"):
        rows(run)


def test_ungradable_documents_are_left_out_on_all_sides_and_counted(tmp_path):
    merge = scores(570, 30)
    merge[0] = merge[599] = None
    run = text_run(tmp_path, merge=merge)
    row = row_of(rows(run), "merge-linear")
    assert (row.n, row.ungradable) == (598, 2)
    assert row.strict == row.base_strict == pytest.approx(100 * 569 / 598, abs=5e-4)
    assert row.vlm_strict == pytest.approx(100 * 209 / 598, abs=5e-4) and row.delta_base == 0
    assert row_of(rows(run), "vlm").n == 600
    assert "2 documents" in to_markdown(run)


def test_nothing_gradable_is_an_error(tmp_path):
    with pytest.raises(DamagedFileError, match="no document is graded"):
        rows(text_run(tmp_path, merge=[None] * 600))


def test_clusters_widen_the_interval(tmp_path):
    merge = scores(450, 150)
    alone = row_of(rows(text_run(tmp_path / "alone", merge=merge)), "merge-linear")
    clusters = [f"fact {index // 10}" for index in range(600)]
    clustered = row_of(rows(text_run(tmp_path / "clustered", merge=merge, clusters=clusters)), "merge-linear")
    assert clustered.ci_high - clustered.ci_low > 2 * (alone.ci_high - alone.ci_low)
    assert clustered.mde > 2 * alone.mde
    assert clustered.delta_base == alone.delta_base


def test_decisions_are_read_off_the_printed_bounds(tmp_path):
    base = scores(570, 30)

    def upper_loss(right):
        return -paired_interval(scores(right, 600 - right), base, 0.05).low

    # A bound that is printed a little higher than it is.
    right = next(right for right in range(500, 565) if upper_loss(right) < round(upper_loss(right), 3) - 1e-4)
    printed = round(upper_loss(right), 3)
    run = text_run(tmp_path, merge=scores(right, 600 - right), base=base)
    assert row_of(rows(run), "merge-linear").ci_low == -printed
    assert row_of(rows(run, margin=printed), "merge-linear").verdict == "inconclusive"
    assert row_of(rows(run, margin=printed + 0.001), "merge-linear").verdict == "restored"


def test_seeds_are_rows_and_no_grid(tmp_path):
    points = [
        PointMaker("base", text=scores(57, 3)),
        PointMaker("vlm", text=scores(21, 39)),
        *(PointMaker("merge", text=scores(40 + seed, 20 - seed), method="dare_linear", seed=seed) for seed in (0, 1)),
    ]
    found = [row for row in rows(write_run(tmp_path / "run", points)) if row.role == "merge"]
    assert [(row.seed, row.standing) for row in found] == [(0, ""), (1, "")]


def test_cells_of_a_grid_are_exploratory(usual):
    assert {row.standing for row in rows(usual) if row.role == "merge"} == {"exploratory"}
    assert {row.standing for row in rows(usual) if row.role != "merge"} == {""}
    assert "ties density=0.2 lambda=0.5 *" in to_markdown(usual)


def test_a_point_without_all_tasks_has_no_overall_verdict(tmp_path):
    points = usual_points()
    points[-1].vision = None
    found = rows(write_run(tmp_path / "run", points))
    assert row_of(found, points[-1].point_id).verdict == "harms"
    assert row_of(found, points[-1].point_id).overall == ""


def test_a_run_whose_parents_are_not_graded_yet_has_rows_without_verdict(tmp_path):
    points = [PointMaker("base"), PointMaker("merge", text=scores(9, 1), method="linear")]
    (row,) = rows(write_run(tmp_path / "run", points))
    assert (row.strict, row.verdict, row.overall, row.delta_base) == (90, "", "", None)


def test_two_parents_of_one_kind_are_refused(tmp_path):
    points = [PointMaker("base", text=scores(1, 1)), PointMaker("base", text=scores(1, 1), method="other")]
    with pytest.raises(DamagedFileError, match="several for base"):
        rows(write_run(tmp_path / "run", points))


def test_another_margin_is_a_post_hoc_reading(usual):
    assert {row.standing for row in rows(usual, margin=2.0)} == {"", "exploratory"}
    found = rows(usual, margin=50)
    assert {row.standing for row in found} == {"post hoc"} and {row.margin for row in found} == {50}
    row = row_of(found, "merge-ties-density0.5-lambda0.5")
    assert row.verdict == "restored"
    assert ",restored (post hoc)," in to_csv([row])


def test_csv_numbers_have_fixed_decimals_and_canonical_parameters(usual):
    lines = to_csv(rows(usual)).splitlines()
    assert lines[-2].startswith(
        'merge-ties-density0.2-lambda1.0,merge,ties,"{""density"":0.2,""lambda"":1.0}",,ancestor,paper,1.0000,,'
        "bench_format,text,base,bench-v1,600,10.000,32.500,95.000,35.000,-25.000,"
    )
    assert lines[-2].endswith(",2,0.05,10.545,-0.4167,0,0,0,harms,harms")
    assert "-0.000" not in "\n".join(lines)


def test_report_is_written_whole_beside_the_records(usual):
    paths = write_report(usual.folder)
    assert paths.csv.read_text() == to_csv(rows(usual)) and paths.csv == usual.folder / "report" / "table.csv"
    assert paths.markdown.read_text() == to_markdown(usual)
    declared = paths.csv.read_bytes()
    again = write_report(usual, margin=50)
    assert again.csv.name == "table-post-hoc.csv" and paths.csv.read_bytes() == declared
    assert sorted(path.name for path in paths.csv.parent.iterdir()) == [
        *("table-post-hoc.csv", "table-post-hoc.md", "table.csv", "table.md")
    ]


def test_caption_says_what_the_numbers_are(usual):
    text = to_markdown(usual)
    for words in (
        "95 %",
        "Margin 2 points",
        "Zero point ancestor",
        "conventions paper",
        "mergelab 0.1.0",
        "exploratory",
        "n = 600",
        "n = 240",
        "protocol bench-v1",
        "MDE",
        "reference vlm",
    ):
        assert words in text
    assert "Post hoc" not in text and "**Post hoc**: margin 50 was chosen" in to_markdown(usual, margin=50)


def test_holm_stands_beside_merges_that_are_no_grid_cells(tmp_path):
    points = [
        PointMaker("base", text=scores(570, 30)),
        PointMaker("vlm", text=scores(210, 390)),
        PointMaker("merge", text=scores(222, 378), method="linear"),
        PointMaker("merge", text=scores(216, 384), method="tsv"),
    ]
    text = to_markdown(write_run(tmp_path / "run", points))
    (linear, tsv) = [
        line.split("|")[10].strip() for line in text.splitlines() if line.startswith(("| linear", "| tsv"))
    ]
    assert (float(linear), float(tsv)) == pytest.approx((2 * 2 * 0.5**12, 2 * 0.5**6), rel=0.05)


def test_fractional_scores_get_a_paired_t(tmp_path):
    run = text_run(tmp_path, merge=[0.5] * 600)
    row = row_of(rows(run), "merge-linear")
    base = [line["strict"] for line in run.points[0].tasks[row.task].samples]
    assert row.reference_p == pytest.approx(stats.ttest_rel([0.5] * 600, base).pvalue, rel=1e-9)
    assert row.strict == 50 and row.verdict == "partly restored"


def test_scale_that_goes_below_zero_is_printed_in_its_own_points(tmp_path):
    draw = random.Random(0)
    low, width = -199.08, 299.08
    points = {role: [draw.uniform(mean - 40, mean + 40) for _ in range(171)] for role, mean in
              (("base", 50), ("vlm", 0), ("merge", 20))}  # fmt: skip
    shares = {role: [(value - low) / width for value in values] for role, values in points.items()}
    run = text_run(tmp_path, shares["merge"], shares["base"], shares["vlm"])
    plain = row_of(rows(run), "merge-linear")
    for point in run.points:
        record = point.tasks[TEXT]
        records.write_task(run.folder, point.point_id, TEXT, {**record.metrics, "lowest": low}, record.samples)
    row = row_of(rows(records.read_run(run.folder)), "merge-linear")
    assert row.strict == pytest.approx(np.mean(points["merge"]), abs=1e-3)
    assert row.base_strict == pytest.approx(np.mean(points["base"]), abs=1e-3)
    test = stats.ttest_rel(points["merge"], points["base"])
    bounds = test.confidence_interval(0.95)
    assert (row.delta_base, row.ci_low, row.ci_high) == pytest.approx(
        (np.mean(points["merge"]) - np.mean(points["base"]), bounds.low, bounds.high), abs=1e-3
    )
    assert row.reference_p == pytest.approx(test.pvalue, rel=1e-6)
    assert (row.recovery, row.moved_p) == (plain.recovery, plain.moved_p)
    assert row.mde == pytest.approx(plain.mde * width / 100, abs=1e-2)
    assert row.verdict == "partly restored"


def test_sample_lines_of_the_builder_are_what_the_reader_takes():
    assert json.loads(json.dumps(samples([1.0, None])))[1]["strict"] is None
