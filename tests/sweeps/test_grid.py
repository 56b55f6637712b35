import pytest

from mergelab.config import Merge, Recipe, load_experiment, load_pair, pair_from_folders, zero_point_of
from mergelab.errors import RecipeError
from mergelab.sweeps.grid import PointSpec, expand, selected_points
from mergelab.sweeps.identity import point_id
from merges.parameters import build, canonical

HALF = {"weights": {"base": 0.5, "vlm": 0.5}}
BENCH = load_pair("bench")
TWO = pair_from_folders("org/base", "org/vlm")


def recipe(**fields):
    return Recipe(**{"name": "a", "pair": "bench", "controls": (), **fields})


def merges(points):
    return [point for point in points if point.role == "merge"]


def test_order_is_parents_controls_then_the_grid_as_written():
    experiment = load_experiment("ties")
    points = expand(experiment.recipe, experiment.pair)
    assert [point.role for point in points] == ["ancestor", "base", "vlm", *["control"] * 3, *["merge"] * 4]
    assert [(point.parameters["density"], point.parameters["lambda"]) for point in merges(points)] == [
        (0.2, 0.5), (0.2, 1.0), (0.5, 0.5), (0.5, 1.0),
    ]  # fmt: skip


def test_first_written_key_changes_slowest():
    points = expand(recipe(method="ties", sweep={"lambda": (1, 0.5), "density": (0.5, 0.2)}), BENCH)
    assert [(point.parameters["lambda"], point.parameters["density"]) for point in merges(points)] == [
        (1.0, 0.5), (1.0, 0.2), (0.5, 0.5), (0.5, 0.2),
    ]  # fmt: skip


def test_parents_are_their_files_and_nothing_else():
    assert expand(recipe(method="ties"), BENCH)[:3] == (
        PointSpec(role="ancestor", inputs=("ancestor",)),
        PointSpec(role="base", inputs=("base",)),
        PointSpec(role="vlm", inputs=("vlm",)),
    )
    assert [point.role for point in expand(recipe(method="ties"), TWO)] == ["base", "vlm", "merge"]


def test_ancestor_stays_a_row_when_task_vectors_start_from_base():
    points = expand(recipe(method="ties", zero_point="base"), BENCH)
    assert [point.role for point in points] == ["ancestor", "base", "vlm", "merge"]
    assert (points[-1].zero_point, points[-1].inputs) == ("base", ("base", "vlm"))
    assert points[-1].parameters["weights"] == {"vlm": 1.0}


def test_controls_are_copies_of_both_parents_and_noise_on_base_per_seed():
    points = expand(recipe(method="ties", controls=("endpoints", "gaussian"), seeds=(0, 7)), BENCH)
    controls = [point for point in points if point.role == "control"]
    assert [(point.method, dict(point.parameters), point.seed, point.zero_point) for point in controls] == [
        ("copy", {"of": "base"}, None, None),
        ("copy", {"of": "vlm"}, None, None),
        ("gaussian", {"scale": 1.0}, 0, "base"),
        ("gaussian", {"scale": 1.0}, 7, "base"),
    ]


@pytest.mark.parametrize(
    ("pair", "written", "expected"),
    [
        (BENCH, {}, (0,)),
        (TWO, {}, (0, 1, 2)),
        (TWO, {"seeds": (1,)}, (1, 0, 2)),
        (TWO, {"seeds": (9, 8, 7, 6)}, (9, 8, 7, 6)),
        (TWO, {"control_seeds": (5,)}, (5,)),
        (BENCH, {"control_seeds": (3, 4)}, (3, 4)),
    ],
)
def test_noise_is_drawn_three_times_on_a_real_pair(pair, written, expected):
    made = recipe(method="dare_linear", controls=("gaussian",), **written)
    points = expand(made, pair)
    assert tuple(point.seed for point in points if point.role == "control") == expected
    assert tuple(point.seed for point in merges(points)) == made.seeds


def test_only_methods_that_draw_are_repeated_per_seed():
    several = recipe(
        merges=(Merge(method="ties"), Merge(method="dare_linear"), Merge(method="dare_ties")), seeds=(4, 2)
    )
    assert [(point.method, point.seed) for point in merges(expand(several, BENCH))] == [
        ("ties", None), ("dare_linear", 4), ("dare_linear", 2), ("dare_ties", 4), ("dare_ties", 2),
    ]  # fmt: skip


def test_averages_have_no_zero_point():
    (point,) = merges(expand(recipe(method="linear", parameters={"weights": {"base": 0.5, "vlm": 0.5}}), BENCH))
    assert (point.zero_point, point.inputs) == (None, ("base", "vlm"))


@pytest.mark.parametrize(("pair", "written", "expected"), [
    (BENCH, None, "ancestor"), (BENCH, "base", "base"), (BENCH, "ancestor", "ancestor"), (TWO, None, "base"),
])  # fmt: skip
def test_zero_point_defaults_to_the_ancestor_if_there_is_one(pair, written, expected):
    assert zero_point_of(recipe(method="ties", zero_point=written), pair) == expected


@pytest.mark.parametrize("name", ("dare", "iso_c", "linear", "slerp", "star", "task_arithmetic", "ties", "tsv"))
def test_canonical_parameters_build_the_same_parameters_again(name):
    experiment = load_experiment(name)
    for point in merges(expand(experiment.recipe, experiment.pair)):
        assert point.method is not None
        again = build(point.method, point.parameters, ("base", "vlm"), point.conventions or "paper")
        assert canonical(again) == point.parameters


def test_conventions_stand_in_the_points():
    (point,) = merges(expand(recipe(method="ties", conventions="mergekit"), BENCH))
    assert (point.conventions, point.parameters["elect"], point.parameters["density"]) == (
        "mergekit",
        "weighted",
        1.0,
    )


def test_selected_point_is_the_one_of_parameters_even_off_the_grid():
    written = recipe(method="ties", parameters={"density": 0.3}, sweep={"density": (0.2, 0.5)})
    (point,) = selected_points(written, BENCH)
    assert point.parameters["density"] == 0.3
    assert [made.parameters["density"] for made in merges(expand(written, BENCH))] == [0.2, 0.5]
    drawn = selected_points(recipe(merges=(Merge(method="dare_ties"), Merge(method="ties")), seeds=(9, 1)), BENCH)
    assert [(made.method, made.seed) for made in drawn] == [("dare_ties", 9), ("ties", None)]


def test_parameters_may_leave_out_what_only_the_sweep_gives_until_the_point_is_asked_for():
    halves = ({"base": 0.5, "vlm": 0.5}, {"base": 0.3, "vlm": 0.7})
    written = recipe(method="linear", sweep={"weights": halves})
    assert len(merges(expand(written, BENCH))) == 2
    with pytest.raises(RecipeError) as caught:
        selected_points(written, BENCH)
    assert str(caught.value) == (
        "recipe a: `parameters` is not a point:\n"
        "  - parameters.weights: linear needs weights that sum to 1, or normalize: true\n"
        "Name one point in full under `parameters:`, or choose one of the grid by its id."
    )


def test_recipe_that_does_not_fit_the_pair_is_refused():
    with pytest.raises(RecipeError, match="recipe a on pair vlm-on-base:\n  - method: with one task vector"):
        expand(recipe(method="tsv"), TWO)


def test_noise_per_merge_names_its_merge_and_reads_what_it_reads():
    written = {"merges": (Merge(method="ties", sweep={"lambda": (0.5, 1.0)}), Merge(method="linear", parameters=HALF))}
    points = expand(recipe(controls=("gaussian_per_merge",), control_seeds=(3, 4), **written), BENCH)
    controls = [point for point in points if point.role == "control"]
    assert [(point.parameters["matched"]["method"], point.seed) for point in controls] == [
        ("ties", 3), ("ties", 4), ("ties", 3), ("ties", 4), ("linear", 3), ("linear", 4),
    ]  # fmt: skip
    assert [point.inputs for point in controls[::2]] == [point.inputs for point in merges(points)]
    prints = dict.fromkeys(("ancestor", "base", "vlm"), "f")
    assert len({point_id(point, prints, "auto") for point in controls}) == len(controls)
