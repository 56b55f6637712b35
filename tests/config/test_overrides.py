import pytest

from mergelab.config import load_experiment, load_recipe, pair_from_folders, parse_settings, resolved
from mergelab.errors import RecipeError, UsageError


def test_values_are_yaml():
    settings = (
        "sweep.lambda=[0.2, 1]",
        "evals.limit=100",
        "parameters={density: 1e-1}",
        "sweep=null",
        "name=a=b",
    )
    assert parse_settings(settings) == {
        "sweep.lambda": [0.2, 1],
        "evals.limit": 100,
        "parameters": {"density": 0.1},
        "sweep": None,
        "name": "a=b",
    }


@pytest.mark.parametrize("setting", ["limit", "=3", "a..b=3", ".a=1", " =1"])
def test_malformed_option_is_a_usage_error(setting):
    with pytest.raises(UsageError, match=r"write KEY=VALUE, for example evals.limit=100"):
        parse_settings((setting,))


def test_a_key_given_twice_and_unreadable_values_are_refused():
    with pytest.raises(UsageError, match="name: given twice; keep one"):
        parse_settings(("name=a", "name=b"))
    with pytest.raises(RecipeError, match=r"^--set seeds: line 1, column \d+: not valid YAML"):
        parse_settings(("seeds=[1,",))


def test_overrides_change_the_recipe_and_are_recorded():
    recipe = load_recipe(
        "ties", {"sweep.lambda": [0.7], "evals.limit": 5, "sink.dtype": "float32", "evals.tasks": ["a"]}
    )
    assert recipe.sweep == {"density": (0.2, 0.5), "lambda": (0.7,)}
    assert resolved(recipe)["evals"]["limit"] == 5
    assert (recipe.evals.tasks, recipe.sink.dtype) == (("a",), "float32")


def test_a_block_written_auto_can_be_set_into(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("name: a\npair: bench\nmethod: ties\nevals: auto\n")
    assert load_recipe(path, {"evals.limit": 5}).evals.limit == 5


def test_entries_of_merges_are_reached_by_number():
    recipe = load_recipe("dare", {"merges.1.parameters.lambda": 0.3, "merges.1.sweep": None})
    assert recipe.entries[1].parameters == {"drop_rate": 0.9, "lambda": 0.3}
    assert recipe.entries[1].sweep is None


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        ({"evals.limt": 3}, ["evals.limt: unknown key (did you mean `limit`?)"]),
        ({"density": 0.5}, ["density: a parameter (of ties); write parameters: {density: 0.5}"]),
        ({"name.x": 1}, ['--set name.x: name is "ties", which has no keys']),
        ({"merges.0.method": "tsv"}, ["--set merges.0.method: the recipe has no list `merges`"]),
        (
            {"seeds": [0], "seeds.1": 3},
            ["--set seeds.1: seeds is a list of 1, it has no entry 1 (the first is 0)"],
        ),
    ],
)
def test_a_bad_override_is_refused_with_the_override_named(overrides, problems):
    with pytest.raises(RecipeError) as caught:
        load_recipe("ties", overrides)
    heading, *lines = str(caught.value).split("\n")
    assert heading.startswith(f"{heading.split('ties.yaml')[0]}ties.yaml with ")
    assert all(f"{key}=" in heading for key in overrides)
    assert lines == [f"  - {problem}" for problem in problems]


def test_paths_typed_on_the_command_line_start_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text("{}\n")
    (tmp_path / "p.yaml").write_text("name: p\nbase: ./b\nvlm: ./v\n")
    experiment = load_experiment(
        "ties",
        {"pair": "p.yaml", "evals.data.ifeval": "d.jsonl", "sink": {"prompts": "./d.jsonl"}},
    )
    assert experiment.recipe.pair == str(tmp_path / "p.yaml")
    assert experiment.pair.base.location == str(tmp_path / "b")
    assert experiment.recipe.evals.data == {"ifeval": str(tmp_path / "d.jsonl")}
    assert experiment.recipe.sink.prompts == str(tmp_path / "d.jsonl")


def test_pair_of_the_command_line_replaces_the_one_of_the_recipe(tmp_path):
    pair = pair_from_folders("./b", "./v")
    experiment = load_experiment("ties", pair=pair)
    assert (experiment.recipe.pair, experiment.pair) == ("v-on-b", pair)
    with pytest.raises(RecipeError, match="method: with one task vector"):
        load_experiment("tsv", pair=pair)


def test_a_misspelt_parameter_is_found_where_it_was_set():
    with pytest.raises(
        RecipeError, match=r"ties.yaml with parameters.densty=0.5: .*\n  - parameters.densty: .*density"
    ):
        load_recipe("ties", {"parameters.densty": 0.5})
