import json
import math
import subprocess
import sys

import pytest

from merges.parameters import (
    PARAMETERS,
    DareTies,
    Linear,
    ParameterErrors,
    Ties,
    build,
    canonical,
    describe,
)

TWO = ("base", "vlm")


def problems(method: str, values: dict[str, object], vectors: tuple[str, ...] = TWO, **more: str) -> list[str]:
    with pytest.raises(ParameterErrors) as caught:
        build(method, values, vectors, **more)
    assert isinstance(caught.value, ValueError)
    return caught.value.problems


def loads_torch(module: str) -> bool:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_parameters_do_not_import_torch() -> None:
    assert not loads_torch("merges.parameters")


def test_the_check_for_torch_can_fail() -> None:
    assert loads_torch("merges.ties")


@pytest.mark.parametrize("method", PARAMETERS)
def test_each_method_has_its_facts(method: str) -> None:
    kind = PARAMETERS[method]
    assert kind.method == method
    assert kind.inputs == ("models" if method in ("linear", "slerp") else "task_vectors")
    assert kind.draws == (method in ("dare_linear", "dare_ties", "gaussian"))
    assert kind.title and kind.source
    assert [info.name for info in describe(method)] == list(
        canonical(build(method, {"weights": {"base": 0.5, "vlm": 0.5}} if method == "linear" else {}, TWO))
    )


def test_scope_says_what_may_be_sliced() -> None:
    scopes = {name: build(name, {"normalize": True} if name == "linear" else {}, TWO).scope for name in PARAMETERS}
    assert scopes == {
        "linear": "entry",
        "task_arithmetic": "entry",
        "ties": "tensor",
        "dare_linear": "entry",
        "dare_ties": "entry",
        "tsv": "tensor",
        "star": "tensor",
        "iso_c": "tensor",
        "slerp": "tensor",
        "gaussian": "tensor",
    }
    assert build("ties", {}, TWO, "official").scope == "entry"
    assert build("dare_linear", {"rescale": "l1"}, TWO).scope == "tensor"
    assert build("dare_ties", {"rescale": "l1"}, TWO).scope == "tensor"


def test_defaults_are_those_of_the_papers() -> None:
    assert canonical(build("ties", {}, TWO)) == {
        "density": 0.2,
        "weights": {"base": 1.0, "vlm": 1.0},
        "lambda": 1.0,
        "trim_scope": "tensor",
        "kept_count": "at_least_one",
        "elect": "raw",
        "zero_sum": "nothing",
        "divisor": "weights",
        "exclude": [],
    }
    assert canonical(build("dare_linear", {}, ("vlm",))) == {
        "drop_rate": 0.9,
        "weights": {"vlm": 1.0},
        "lambda": 1.0,
        "rescale": "inverse",
        "exclude": [],
    }


def test_canonical_is_the_same_text_for_equal_values() -> None:
    one = build("ties", {"density": 1, "weights": {"vlm": 2, "base": 1}, "lambda": 1}, TWO)
    other = build("ties", {"lambda": 1.0, "weights": {"base": 1.0, "vlm": 2.0}, "density": 1.0}, TWO)
    assert json.dumps(canonical(one)) == json.dumps(canonical(other))
    assert one == other
    assert hash(one) == hash(other)
    different = build("ties", {"density": 0.5, "weights": {"base": 1.0, "vlm": 2.0}}, TWO)
    assert json.dumps(canonical(one)) != json.dumps(canonical(different))


def test_all_problems_are_listed_at_once() -> None:
    found = problems(
        "ties",
        {
            "lamda": 0.5,
            "density": 0,
            "elect": "sum",
            "weights": {"base": 1, "ancestor": 1},
            "trim_scope": "models",
            "exclude": ["embeddings", "head"],
        },
        conventions="oficial",
    )
    text = "\n".join(found)
    assert "conventions: 'oficial' is unknown; did you mean official?" in text or "known: paper" in text
    assert "lamda: ties has no such parameter; did you mean lambda?" in text
    assert "density: expected in (0, 1], found 0" in text
    assert "elect: expected raw | weighted | count, found the text 'sum'" in text
    assert "weights: there is no vector of ancestor, only of base, vlm" in text
    assert "weights: no weight for vlm" in text
    assert "trim_scope: expected tensor | model, found the text 'models'" in text
    assert "exclude: expected a list of embedding, head" in text and "found the text 'embeddings'" in text
    assert len(found) == 8


@pytest.mark.parametrize("density", [0, -0.1, 1.0000001, math.nan, math.inf, True, "0.2", None, [0.2]])
def test_f8_density_outside_its_range_is_refused(density: object) -> None:
    (problem,) = problems("ties", {"density": density})
    assert problem.startswith("density: expected")
    assert repr(density) in problem


@pytest.mark.parametrize("drop_rate", [1, 1.5, -0.1, math.nan, False, "0.9", 10**400])
def test_f8_drop_rate_outside_its_range_is_refused(drop_rate: object) -> None:
    (problem,) = problems("dare_linear", {"drop_rate": drop_rate})
    assert problem.startswith("drop_rate: expected")


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", None])
def test_lambda_must_be_a_finite_number(value: object) -> None:
    (problem,) = problems("task_arithmetic", {"lambda": value})
    assert problem.startswith("lambda: expected")


@pytest.mark.parametrize("weights", [{}, {"base": "1", "vlm": 1}, {"base": math.nan, "vlm": 1}, [1, 1], 1, {3: 1}])
def test_weights_must_be_finite_numbers_by_role(weights: object) -> None:
    (problem,) = problems("task_arithmetic", {"weights": weights})
    assert problem.startswith("weights: expected")


def test_linear_weights_sum_to_one() -> None:
    (problem,) = problems("linear", {"weights": {"base": 0.5, "vlm": 0.6}})
    assert "found 1.1" in problem
    (problem,) = problems("linear", {})
    assert problem.startswith("weights: linear needs weights")
    (problem,) = problems("linear", {"weights": {"base": 1, "vlm": -1}, "normalize": True})
    assert "sum to 0" in problem
    assert build("linear", {"weights": {"base": 0.1, "vlm": 0.9}}, TWO) == Linear(weights={"base": 0.1, "vlm": 0.9})
    assert build("linear", {"normalize": True}, TWO).weights == {"base": 1.0, "vlm": 1.0}  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_f1_a_weight_that_would_cancel_is_refused(method: str) -> None:
    (problem,) = problems(method, {"weights": {"vlm": 0.1}}, ("vlm",))
    assert "cancels" in problem and "0.1" in problem and "lambda" in problem
    assert build(method, {"weights": {"vlm": 1}}, ("vlm",)).weights == {"vlm": 1.0}
    assert build(method, {"weights": {"vlm": 0.1}, "divisor": "count"}, ("vlm",)).weights == {"vlm": 0.1}


@pytest.mark.parametrize("kind", [Ties, DareTies])
def test_a_weighted_mean_needs_weights_it_can_divide_by(kind: type[Ties] | type[DareTies]) -> None:
    with pytest.raises(ParameterErrors, match=r"at least 0, found .*-1"):
        kind(weights={"base": 1, "vlm": -1})
    with pytest.raises(ParameterErrors, match="above 0"):
        kind(weights={"base": 0, "vlm": 0})
    assert kind(weights={"base": 1, "vlm": -1}, divisor="none").weights == {"base": 1.0, "vlm": -1.0}


def test_tsv_with_one_vector_is_refused_with_the_reason() -> None:
    (problem,) = problems("tsv", {}, ("vlm",))
    assert "one task vector" in problem and "task arithmetic" in problem


def test_gaussian_needs_the_vlm() -> None:
    (problem,) = problems("gaussian", {}, ("base",))
    assert "vlm" in problem


def test_unknown_method_names_the_nearest() -> None:
    (problem,) = problems("tie", {})
    assert "did you mean ties?" in problem
    with pytest.raises(ParameterErrors, match="did you mean tsv"):
        describe("tvs")


def test_conventions_flip_the_defaults_and_can_be_overridden() -> None:
    assert canonical(build("ties", {}, TWO, "mergekit")) | {"weights": 0} == {
        "density": 1.0,
        "weights": 0,
        "lambda": 1.0,
        "trim_scope": "tensor",
        "kept_count": "at_least_one",
        "elect": "weighted",
        "zero_sum": "plus",
        "divisor": "weights",
        "exclude": [],
    }
    assert build("ties", {"elect": "raw"}, TWO, "mergekit").elect == "raw"  # type: ignore[union-attr]
    assert build("dare_ties", {}, TWO, "mergekit").rescale == "l1"  # type: ignore[union-attr]
    assert build("linear", {}, TWO, "mergekit").normalize is True  # type: ignore[union-attr]


def test_conventions_refuse_what_they_do_not_define() -> None:
    (problem,) = problems("slerp", {}, conventions="official")
    assert "official has no method slerp" in problem
    (problem,) = problems("tsv", {}, conventions="mergekit")
    assert "mergekit has no method tsv" in problem
    (problem,) = problems("ties", {}, conventions="peft")
    assert problem == "density: ties needs a value, conventions peft has no default"


@pytest.mark.parametrize("method", PARAMETERS)
def test_describe_names_a_range_and_a_meaning(method: str) -> None:
    for info in describe(method):
        assert info.bounds and info.meaning and info.type in ("number", "word", "words", "flag", "weights")
    assert "lambda_" not in [info.name for info in describe(method)]


def test_conventions_official_are_those_of_the_authors_code() -> None:
    found = canonical(build("ties", {}, TWO, "official"))
    assert (found["density"], found["lambda"]) == (0.2, 1.0)
    assert (found["trim_scope"], found["kept_count"]) == ("model", "threshold")
    assert (found["elect"], found["zero_sum"], found["divisor"]) == ("raw", "majority", "count")
    for method in ("tsv", "star", "iso_c"):
        assert canonical(build(method, {}, TWO, "official"))["svd_scope"] == "matrices"
        assert canonical(build(method, {}, TWO))["svd_scope"] == "linear"


def test_the_model_scope_counts_by_threshold_alone() -> None:
    (problem,) = problems("ties", {"trim_scope": "model"})
    assert problem.startswith("kept_count:") and "write kept_count: threshold" in problem


@pytest.mark.parametrize("value", ["embedding", ["embedding", "embedding"], ["vision"], [1], None, {}])
def test_exclude_is_a_list_of_different_kinds(value: object) -> None:
    (problem,) = problems("task_arithmetic", {"exclude": value})
    assert problem.startswith("exclude:")


def test_exclude_is_the_same_in_any_order() -> None:
    one, other = (build("tsv", {"exclude": kinds}, TWO) for kinds in (["head", "norm"], ("norm", "head")))
    assert one == other
    assert json.dumps(canonical(one)) == json.dumps(canonical(other))


def test_slerp_needs_two_models() -> None:
    (problem,) = problems("slerp", {}, ("vlm",))
    assert "from one model to another" in problem
    (problem,) = problems("slerp", {"t": 1.1})
    assert problem == "t: expected in [0, 1], found 1.1"


@pytest.mark.parametrize("eta", [0, -1, 100.5])
def test_eta_is_a_percentage(eta: float) -> None:
    (problem,) = problems("star", {"eta": eta})
    assert problem == f"eta: expected in (0, 100], found {eta}"
