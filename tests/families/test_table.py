"""What is said about how far families are checked is what the tests check."""

from pathlib import Path

import pytest

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.towers.detection import choose_family
from mergelab.towers.rules import FOLDER, shipped_families
from tests.families.catalogue import FAMILIES
from tests.families.checkpoints import Build, stored
from tests.families.family import Family
from tests.families.table import table


def test_list_of_families_is_the_one_of_the_tests() -> None:
    assert (FOLDER / "TESTED.md").read_text(encoding="utf-8") == table(), "python -m tests.families.table > TESTED.md"


@pytest.mark.parametrize("family", [pytest.param(f, id=f.id) for f in FAMILIES if f.sees_pictures])
def test_layouts_of_a_family_are_those_its_class_saves(built: Build, family: Family, tmp_path: Path) -> None:
    known = built(family)
    known.vlm.save_pretrained(tmp_path)
    saved, native = ({n: t.shape for n, t in stored(f).items()} for f in (tmp_path, known.folder("native")))
    # It saves the stacked experts of Qwen3-VL-MoE as it has them, not transposed as the hub does.
    assert (saved != native) is ("hub" in family.layouts)


def test_family_files_that_claim_a_class_are_those_the_matrix_uses(built: Build) -> None:
    used = set()
    for family in FAMILIES:
        for layout in family.layouts:
            checkpoint = open_checkpoint(built(family).folder(layout))
            found = choose_family(checkpoint.tensors, checkpoint.config)
            used.add(found.family if found is not None else "")
    assert used - {""} == {family.family for family in shipped_families() if family.checked == "tiny class"}
