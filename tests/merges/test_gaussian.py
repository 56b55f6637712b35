import pytest
import torch

from merges.gaussian import gaussian
from merges.parameters import Gaussian
from merges.random import standard_normal, stream_key
from tests.merges.inputs import block, merge, normal, same_bits


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_norm_is_that_of_the_change(scale: float) -> None:
    zero = torch.zeros(40, 30)
    vlm = normal((40, 30), 1, 1e-3)
    noise = merge("gaussian", zero, [vlm], scale=scale)
    wanted = scale * float(vlm.double().norm())
    assert float(noise.double().norm()) == pytest.approx(wanted, rel=1e-7)
    cosine = float((noise.double() * vlm.double()).sum() / noise.double().norm() / vlm.double().norm())
    assert abs(cosine) < 4 / (40 * 30) ** 0.5


def test_noise_is_the_stream_of_the_tensor() -> None:
    vlm = normal((40, 30), 1)
    noise = merge("gaussian", torch.zeros(40, 30), [vlm], seed=5, name="a")
    stream = standard_normal(stream_key("noise", 5, "vlm", "a"), 0, 1200).view(40, 30)
    torch.testing.assert_close(noise, stream * (vlm.norm() / stream.norm()))
    for other in ({"seed": 6, "name": "a"}, {"seed": 5, "name": "b"}):
        assert not torch.equal(noise, merge("gaussian", torch.zeros(40, 30), [vlm], **other))  # type: ignore[arg-type]


def test_only_the_vlm_is_measured() -> None:
    zero, base, vlm = (normal((50,), seed) for seed in range(3))
    assert same_bits(merge("gaussian", zero, [base, vlm]), merge("gaussian", zero, [vlm]))


def test_norms_no_change_and_scale_zero_leave_the_zero_point() -> None:
    zero, vlm = torch.tensor([-0.0, 1.0]), torch.tensor([2.0, 3.0])
    assert same_bits(merge("gaussian", zero, [vlm], kind="norm"), zero)
    assert same_bits(merge("gaussian", zero, [zero]), zero)
    assert same_bits(merge("gaussian", zero, [vlm], scale=0), zero)
    assert not same_bits(merge("gaussian", zero, [vlm]), zero)


def test_without_a_vlm_or_on_a_slice_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found \('base',\)"):
        gaussian(torch.zeros(2), [torch.ones(2)], Gaussian(), block(("base",)))
    with pytest.raises(ValueError, match="starts at entry 2"):
        merge("gaussian", torch.zeros(2), [torch.ones(2)], start=2)
