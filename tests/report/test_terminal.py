from __future__ import annotations

from pathlib import Path

import pytest

from mergelab import records
from mergelab.report.checks import notes
from mergelab.report.rows import rows
from mergelab.report.terminal import render_lines
from tests.report.run_folders import TEXT, PointMaker, samples, scores, usual_points, write_run


def said(run, **options):
    return "\n".join(render_lines(run, **options))


def noted(run):
    return notes(run, rows(run))


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("usual") / "run", usual_points())


def parents(n=600):
    return [
        PointMaker("base", text=scores(n * 95 // 100, n // 20), weights="base"),
        PointMaker("vlm", text=scores(n * 35 // 100, n * 65 // 100), weights="vlm"),
    ]


def merge(right=300, wrong=300, **more):
    return PointMaker("merge", text=scores(right, wrong), **{"method": "linear", **more})


def test_lines_fit_into_100_columns(usual):
    for margin in (None, 50):
        wide = [line for line in render_lines(usual, margin) if len(line) > 100]
        assert [line for line in wide if not line.startswith(("table: ", "next: "))] == []


def test_long_parameters_wrap_and_nothing_is_cut(tmp_path):
    weights = [
        {"weights": {"base": share, "vlm": 1 - share}, "normalize": True, "mode": str(share)} for share in (0.25, 0.75)
    ]
    points = parents() + [merge(method="task_arithmetic", parameters=given) for given in weights]
    lines = render_lines(write_run(tmp_path / "run", points))
    assert max(len(line) for line in lines if not line.startswith(("table: ", "next: "))) <= 100
    first_column = "".join(line[:40].split("  ")[0] for line in lines[2:])
    for part in ("task_arithmetic", "weights=base", "0.25", "0.75", "mode="):
        assert part in first_column
    assert "…" not in "".join(lines)


def test_every_point_has_a_line_parents_and_controls_first(usual):
    lines = render_lines(usual)
    starts = [line.split("  ")[0].strip() for line in lines[2:8]]
    assert starts == [
        "base",
        "ancestor",
        "vlm",
        "control: copy of base",
        "control: copy of vlm",
        "control: gaussian",
    ]
    assert sum(line.startswith("ties density=") for line in lines) == 3
    restored = next(line for line in lines if line.startswith("ties density=0.2"))
    for cell in ("1.20", "95.0", "+0.0 [-0.6,+0.6]", "100.0 retained", "restored"):
        assert cell in restored


def test_it_ends_with_sentences_the_closing_line_files_and_next(usual):
    lines = render_lines(usual)
    for verdict in (
        "restored",
        "partly restored",
        "fails to restore",
        "harms",
        "retained",
        "lost",
        "inconclusive",
    ):
        assert sum(line.startswith(f"{verdict}: ") for line in lines) == 1
    assert not any(line.startswith("no gap: ") for line in lines)
    assert "1 of 3 merges restore text, 1 of them keep pictures." in lines
    assert f"table: {usual.folder}/report/table.md and table.csv; every answer: {usual.folder}/points" in lines
    assert "next: mergelab merge RECIPE --point merge-ties-density0.2-lambda0.5 --out DIR --as vlm" in lines
    assert lines[-1] == f"next: mergelab report {usual.folder} --margin POINTS"


def test_post_hoc_reading_says_so(usual):
    text = said(usual, margin=50)
    assert "margin 50 (post hoc)" in text
    assert "post hoc, margin 50 instead of 2: 2 of 3 merges restore text, 2 of them keep pictures." in text


def test_without_picture_tasks_the_closing_line_says_so(tmp_path):
    lines = render_lines(write_run(tmp_path / "run", [*parents(), merge(570, 30)]))
    assert "1 of 1 merges restore text; pictures were not graded." in lines


def test_only_picture_tasks_get_their_own_table(tmp_path):
    points = [
        PointMaker("vlm", vision=scores(240, 0)),
        PointMaker("merge", vision=scores(239, 1), method="linear"),
    ]
    text = said(write_run(tmp_path / "run", points))
    assert "minus vlm" in text and "text was not graded." in text


def test_negative_result_names_selection(tmp_path):
    points = [*parents(), merge(parameters={"a": 1}), merge(310, 290, parameters={"a": 2})]
    text = said(write_run(tmp_path / "run", points))
    assert "0 of 2 merges restore text; pictures were not graded. Even the best" in text


def test_an_empty_run_renders(tmp_path):
    text = said(write_run(tmp_path / "run", [PointMaker("base")], missing=["a", "b"]))
    assert "no merge is graded" in text and "3 of 3 points have no graded task" in text


def test_square_brackets_in_names_are_not_markup(tmp_path):
    points = [*parents(), *(merge(method="m", parameters={"x": f"[red]{i}"}) for i in (1, 2))]
    assert "m x=[red]1" in said(write_run(tmp_path / "run", points))


def test_seeds_are_told_apart_in_merges_and_controls(tmp_path):
    points = parents()
    for seed in (0, 1):
        points.append(PointMaker("control", text=scores(500, 100), method="gaussian", seed=seed))
        points.append(merge(method="dare_linear", parameters={"drop_rate": 0.5}, seed=seed))
    text = said(write_run(tmp_path / "run", points))
    for label in (
        "control: gaussian seed=0",
        "control: gaussian seed=1",
        "dare_linear seed=0",
        "dare_linear seed=1",
    ):
        assert label in text


# Checks


def test_endpoint_controls_that_repeat_their_parents_pass(usual):
    lines = noted(usual)
    assert f"control passed: the copy of base repeats base on all 600 documents of {TEXT}." in lines
    assert not [line for line in lines if "WARNING" in line or "no effective change" in line]


def test_endpoint_control_with_other_answers_is_a_warning_with_the_count(tmp_path):
    control = PointMaker(
        "control",
        text=scores(567, 33),
        method="copy",
        parameters={"of": "base"},
        author="base",
        weights="other",
    )
    lines = noted(write_run(tmp_path / "run", [*parents(), control]))
    assert any(line.startswith("WARNING: the copy of base answers 3 of 600") for line in lines)
    assert "WARNING: the weights of the copy of base are not the weights of base." in lines


def test_a_merge_that_is_a_parent_is_no_effective_change(tmp_path):
    lines = noted(write_run(tmp_path / "run", [*parents(), merge(weights="vlm")]))
    assert "no effective change: linear is vlm bit for bit." in lines


def test_a_merge_that_answers_like_a_parent_is_no_effective_change(tmp_path):
    lines = noted(write_run(tmp_path / "run", [*parents(), merge(210, 390, author="vlm")]))
    assert (
        "no effective change: linear gives vlm's answer to every document, though 25 % of the entries differ." in lines
    )


def test_equal_parents_are_no_effective_change(tmp_path):
    points = parents()
    points[1].weights = "base"
    assert any("base and the vlm's tower are the same" in line for line in noted(write_run(tmp_path / "run", points)))


def test_two_points_with_the_same_weights_are_flagged(tmp_path):
    points = [
        *parents(),
        *(merge(parameters={"a": a}, weights="twin") for a in (1, 2)),
        merge(parameters={"a": 3}),
    ]
    assert "the same weights under two names: linear a=1, linear a=2." in noted(write_run(tmp_path / "run", points))


@pytest.mark.parametrize(("truncated", "is_flagged"), [(12, False), (13, True)])
def test_more_than_two_percent_truncated_is_flagged(tmp_path, truncated, is_flagged):
    run = write_run(tmp_path / "run", [*parents(), merge(truncated=truncated)])
    line = (
        f"cut off: 1 of 3 points ran out of tokens on more than 2 % of {TEXT}, most often linear "
        f"({truncated} documents)."
    )
    assert (line in noted(run)) == is_flagged
    assert ("50.0°" in said(run)) == is_flagged


@pytest.mark.parametrize(("right", "word"), [(29, "floor: vlm"), (30, "low: vlm"), (59, "low: vlm"), (60, None)])
def test_weak_parents_are_flagged(tmp_path, right, word):
    points = [parents()[0], PointMaker("vlm", text=scores(right, 600 - right))]
    lines = [line for line in noted(write_run(tmp_path / "run", points)) if line.startswith(("floor", "low"))]
    assert [line[: len(word)] for line in lines] == [word] if word else not lines


def test_rank_correlation_needs_four_merges(tmp_path):
    def run(count):
        cells = [merge(300 + 10 * i, 300 - 10 * i, parameters={"a": i}, sink=i * i) for i in range(count)]
        return write_run(tmp_path / str(count), [*parents(), *cells])

    assert not [line for line in noted(run(3)) if "Spearman" in line]
    (line,) = [line for line in noted(run(4)) if "Spearman" in line]
    assert "over 4 merges (4 distinct): Spearman 1.00" in line


def test_rank_correlation_of_constant_scores_is_left_out(tmp_path):
    cells = [merge(parameters={"a": i}, sink=i) for i in range(5)]
    assert not [line for line in noted(write_run(tmp_path / "run", [*parents(), *cells])) if "Spearman" in line]


def test_missing_parents_and_points_are_named(tmp_path):
    run = write_run(tmp_path / "run", [PointMaker("base"), merge()], missing=["later"])
    lines = noted(run)
    assert any(line.startswith("unfinished: 2 of 3 points") for line in lines)
    assert any(line.startswith(f"no verdict on {TEXT}") and "linear" in line for line in lines)


def with_pictures(tmp_path: Path, shares: dict[str, float], primary: tuple[str, ...] = (TEXT,)) -> records.Run:
    """The usual run, with picture tasks of 400 documents that every merge answers as well as the share says."""
    points = usual_points()
    for maker in points:
        maker.vision = None
    run = write_run(tmp_path / "run", points, primary=primary)
    for task, share in shares.items():
        for one in run.points:
            right = round(400 * (1.0 if one.role == "vlm" or one.point["parameters"] == {"of": "vlm"} else share))
            if one.role in ("base", "ancestor"):
                continue
            lines = samples(scores(right, 400 - right), task=task, author=one.point_id)
            metrics = {"key": "k", "task": task, "modality": "vision", "protocol": "lmms-eval 0.7.2"}
            imported = {"tool": "lmms-eval", "version": "0.7.2"}
            records.write_task(run.folder, one.point_id, task, {**metrics, "imported": imported}, lines)
    return records.read_run(run.folder)


def test_several_picture_tasks_stand_side_by_side(tmp_path):
    run = with_pictures(tmp_path, {"mmmu_val": 1.0, "chartqa": 0.5, "mme": 1.0, "pope": 0.9})
    drawn = render_lines(run)
    table = drawn[: next(n for n, line in enumerate(drawn) if line.startswith(("°", "*")))]
    assert all(len(line) <= 100 for line in table)
    assert sum(line.startswith("pictures, minus vlm, margin 2") for line in table) == 2, "three tasks, then the fourth"
    head = next(line for line in table if line.startswith(" ") and "mmmu_val" in line)
    assert head.split() == ["chartqa", "mme", "mmmu_val"]
    merge = next(n for n, line in enumerate(table) if line.startswith("ties density=0.2 lambda=0.5") and "50.0" in line)
    assert table[merge].split()[-6:] == ["50.0", "lost", "100.0", "retained", "100.0", "retained"]
    assert "-50.0 [" in table[merge + 1]
    beside = next(n for n, line in enumerate(table) if line.startswith("ties density=0.2 lambda=0.5"))
    assert table[beside].split()[-2:] == ["lost:", "restored"] and table[beside + 1].split() == ["chartqa,", "pope"]
    assert "1 of 3 merges restore text, 0 of them keep pictures." in " ".join(drawn)
    assert "mmmu_val is imported, graded by lmms-eval 0.7.2" in " ".join(drawn)


def test_the_picture_tasks_that_count_decide_what_stands_beside_text(tmp_path):
    run = with_pictures(tmp_path, {"mmmu_val": 1.0, "chartqa": 0.5}, primary=(TEXT, "mmmu_val"))
    drawn = render_lines(run)
    assert "pictures: mmmu_val" in drawn[0]
    beside = next(line for line in drawn if line.startswith("ties density=0.2 lambda=0.5"))
    assert beside.endswith("retained restored")
