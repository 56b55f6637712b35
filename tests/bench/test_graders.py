"""The graders on tables of replies, with the near misses that a careless grader would forgive or punish."""

import pytest

from mergelab.bench.data.tasks import bench_tasks

CAPITAL = {"target": "[[Paris]]", "answer": "Paris"}
SHAPE = {
    "kind": "shape",
    "answers": ["cross", "crosses"],
    "sentences": ["They are crosses.", "They are blue crosses."],
}
COUNT = {"kind": "count", "answers": ["1"], "sentences": ["There is 1 blue shape.", "There is 1 cross."]}
POSITION = {"kind": "position", "answers": ["top left"], "sentences": ["The cross is at the top left."]}
TOP = {"kind": "position", "answers": ["top"], "sentences": ["The cross is at the top."]}


@pytest.mark.parametrize(
    ("reply", "strict", "flexible"),
    [
        ("[[Paris]]", 1, 1),
        (" [[Paris]]", 0, 1),
        ("[[Paris]] ", 0, 1),
        ("[[Paris]]\n", 0, 1),
        ("[[paris]]", 0, 1),
        ("[[ Paris ]]", 0, 1),
        ("[Paris]", 0, 1),
        ("The answer is Paris.", 0, 1),
        ("[[Madrid]]", 0, 0),
        ("[[Parisian]]", 0, 0),
        ("", 0, 0),
    ],
)
def test_text_replies(reply, strict, flexible):
    assert bench_tasks.grade_format(CAPITAL, [reply]) == {"strict": strict, "flexible": flexible}


@pytest.mark.parametrize(("reply", "flexible"), [("2", 1), ("[[2]]", 1), ("12", 0), ("2.", 1), ("23", 0)])
def test_numbers_count_as_whole_words(reply, flexible):
    doc = {"target": "- 2", "answer": "2"}
    assert bench_tasks.grade_format(doc, [reply]) == {"strict": 0, "flexible": flexible}


@pytest.mark.parametrize(
    ("doc", "reply", "strict", "flexible"),
    [
        (SHAPE, "They are crosses.", 1, 1),
        (SHAPE, "They are blue crosses.", 1, 1),
        (SHAPE, "They are red crosses.", 0, 1),
        (SHAPE, "It is a cross.", 0, 1),
        (SHAPE, "They are crossed.", 0, 0),
        (COUNT, "There is 1 cross.", 1, 1),
        (COUNT, "There are 11 crosses.", 0, 0),
        (POSITION, "The cross is at the top left.", 1, 1),
        (POSITION, "top left", 0, 1),
        (POSITION, "The cross is at the top.", 0, 0),
        (POSITION, "The cross is at the left.", 0, 0),
        (TOP, "The cross is at the top.", 1, 1),
        (TOP, "The cross is at the top left.", 0, 0),
        (TOP, "It floats.", 0, 0),
    ],
)
def test_picture_replies(doc, reply, strict, flexible):
    assert bench_tasks.grade_image(doc, [reply]) == {"strict": strict, "flexible": flexible}
