"""Closed forms, laws and golden values of the row metric; tensors are written by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergelab.sinks.metric import Rows, join_rows, measure_rows, read_bfloat16, sink_rate_share

GRID = {
    0.9140625: 2.36,
    0.86328125: 1.84,
    0.83984375: 1.66,
    0.80859375: 1.44,
    0.80078125: 1.39,
    0.79296875: 1.34,
    0.78515625: 1.30,
    0.765625: 1.18,
    0.7109375: 0.90,
    0.6015625: 0.41,
    0.55859375: 0.24,
    0.453125: -0.19,
    0.447265625: -0.21,
}
"""bfloat16 probability to the published S, two decimals (reference table of the paper's grid)."""


def row(*scores: float, visible: list[bool] | None = None, dtype: torch.dtype = torch.float32) -> Rows:
    tensor = torch.tensor(scores, dtype=dtype).view(1, 1, -1)
    return measure_rows(tensor, torch.tensor(visible or [True] * len(scores)))


def causal(scores: torch.Tensor) -> Rows:
    size = scores.shape[-1]
    return measure_rows(scores, torch.ones(size, size, dtype=torch.bool).tril())


@pytest.mark.parametrize("n", [2, 3, 7, 100])
def test_equal_scores_give_minus_log_of_the_other_keys(n: int) -> None:
    rows = row(*[1.5] * n)
    assert rows.log_odds.item() == pytest.approx(-math.log(n - 1), abs=1e-6)
    assert rows.gap.item() == 0.0
    assert rows.first_mass.item() == pytest.approx(1 / n, rel=1e-6)


def test_tie_takes_the_first_index() -> None:
    assert row(2.0, 2.0, 1.0).is_first.item()
    assert not row(1.0, 2.0, 2.0).is_first.item()


def test_worked_row_of_four_scores() -> None:
    rows = row(5.0, 0.0, 0.0, 0.0)
    assert rows.log_odds.item() == pytest.approx(3.9014, abs=5e-5)
    assert rows.gap.item() == 5.0
    assert rows.is_first.item()


def test_scores_keep_what_float32_probabilities_lose() -> None:
    scores = torch.tensor([[[40.0, 0.0]]])
    assert torch.softmax(scores, dim=-1).max() == 1.0
    assert row(40.0, 0.0).log_odds.item() == 40.0
    assert row(300.0, 0.0).log_odds.item() == 300.0


def test_one_visible_key_is_infinite_and_takes_all_mass() -> None:
    rows = row(3.0, 9.0, visible=[True, False])
    assert rows.log_odds.item() == math.inf
    assert rows.first_mass.item() == 1.0
    assert rows.num_visible.item() == 1


def test_invisible_keys_do_not_count() -> None:
    seen = row(9.0, 1.0, 0.5, 99.0, visible=[False, True, True, False])
    alone = row(1.0, 0.5)
    assert seen.log_odds.item() == alone.log_odds.item()
    assert seen.gap.item() == alone.gap.item()
    assert seen.first_mass.item() == 0.0
    assert not seen.is_first.item()
    assert seen.num_visible.item() == 2


def test_row_without_any_key_is_refused() -> None:
    with pytest.raises(ValueError, match="sees no key"):
        row(1.0, 2.0, visible=[False, False])


def test_low_precision_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16, expected float32"):
        row(1.0, 2.0, dtype=torch.bfloat16)


scores_of_a_row = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=9)


@settings(max_examples=60, deadline=None)
@given(scores_of_a_row, st.floats(-50, 50, width=32))
def test_laws_of_any_row(scores: list[float], shift: float) -> None:
    rows = row(*scores, dtype=torch.float64)
    n = len(scores)
    log_odds, gap = rows.log_odds.item(), rows.gap.item()
    assert gap >= 0.0
    assert gap >= log_odds - 1e-12
    assert log_odds >= -math.log(n - 1) - 1e-12 if n > 1 else True
    if n == 2:
        assert log_odds == pytest.approx(gap, abs=1e-12)
        assert log_odds >= 0.0
    probability = torch.softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
    others = math.fsum(sorted(probability.tolist())[:-1])
    assert log_odds == pytest.approx(math.log(probability.max().item() / others), abs=1e-9)
    assert rows.first_mass.item() == pytest.approx(probability[0].item(), abs=1e-12)
    shifted = row(*[score + shift for score in scores], dtype=torch.float64)
    assert shifted.log_odds.item() == pytest.approx(log_odds, abs=1e-9)
    assert shifted.gap.item() == pytest.approx(gap, abs=1e-9)


@pytest.mark.parametrize(("probability", "published"), GRID.items(), ids=[str(value) for value in GRID.values()])
def test_bfloat16_read_out_gives_published_values(probability: float, published: float) -> None:
    # An offset of a third of a step is what rounding must remove.
    step = 2**-8 if probability >= 0.5 else 2**-9
    nearby = torch.logit(torch.tensor(probability + step / 3))
    assert f"{read_bfloat16(nearby).item():.2f}" == f"{published:.2f}"
    assert nearby.item() != pytest.approx(read_bfloat16(nearby).item(), abs=1e-4)


def test_bfloat16_read_out_equals_the_eager_cast() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 4 * torch.randn(3, 40, 40, generator=generator)
    rows = causal(scores)
    masked = scores.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -math.inf)
    largest = torch.softmax(masked, dim=-1, dtype=torch.float32).to(torch.bfloat16).amax(dim=-1).double()
    expected = torch.log(largest) - torch.log1p(-largest)
    torch.testing.assert_close(read_bfloat16(rows.log_odds).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.isinf(expected).any()
    assert not torch.allclose(rows.log_odds.double()[:, 1:], expected[:, 1:], atol=1e-3)


def test_bfloat16_read_out_saturates_above_the_largest_finite_value() -> None:
    values = read_bfloat16(torch.tensor([5.5, 6.9, 40.0]))
    assert values[0].item() == pytest.approx(math.log(255), abs=1e-4)
    assert values[1].item() == math.inf
    assert values[2].item() == math.inf


def test_sink_rate_share_of_uniform_causal_attention_is_harmonic() -> None:
    rows = causal(torch.zeros(2, 64, 64))
    harmonic = sum(1 / i for i in range(1, 65)) / 64
    torch.testing.assert_close(sink_rate_share(rows.first_mass), torch.full((2,), harmonic))
    assert harmonic == pytest.approx(0.0741, abs=5e-5)


def test_sink_rate_share_bounds_and_truncation() -> None:
    everything = torch.zeros(1, 80, 80)
    everything[..., 0] = 200.0
    assert sink_rate_share(causal(everything).first_mass).item() == 1.0
    nothing = torch.zeros(1, 64, 64)
    nothing[..., 0] = -200.0
    assert sink_rate_share(causal(nothing).first_mass).item() == pytest.approx(1 / 64)
    uniform = torch.zeros(1, 80, 80)
    cut = sink_rate_share(causal(uniform).first_mass)
    assert cut.item() == pytest.approx(sink_rate_share(causal(uniform[:, :64, :64]).first_mass).item())
    assert cut.item() != pytest.approx(causal(uniform).first_mass.mean().item())


def test_joined_blocks_equal_the_whole() -> None:
    scores = torch.randn(2, 9, 9, generator=torch.Generator().manual_seed(1))
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    whole = measure_rows(scores, visible)
    parts = join_rows([measure_rows(scores[:, a:b, :b], visible[a:b, :b]) for a, b in ((0, 1), (1, 6), (6, 9))])
    for name in ("log_odds", "gap", "is_first", "first_mass", "num_visible"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-6, atol=1e-6)
