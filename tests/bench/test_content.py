"""Questions, formats, the split rule and pictures: what the pair is trained and asked on."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from mergelab.bench import facts, pictures
from mergelab.bench.data.tasks import bench_tasks
from mergelab.bench.formats import FORMATS, Prompt, draw_training_prompt, is_held_out
from mergelab.bench.pictures import Scene, draw_pixels, model_pixels, questions
from mergelab.bench.tasks import format_rows, held_out_scenes, image_rows
from mergelab.bench.tokenizer import IMAGE, SPECIAL_TOKENS, VOCABULARY_SIZE, train_tokenizer


@pytest.mark.parametrize("name", facts.FAMILIES)
def test_every_reply_holds_the_answer_as_a_word(name):
    rng = Random(0)
    for _ in range(50):
        question = facts.FAMILIES[name](rng)
        assert question.family == name
        assert bench_tasks.has_word(question.sentence, question.answer)
        assert bench_tasks.has_word(question.statement, question.answer)


def test_the_free_form_sentence_holds_no_other_candidate_of_the_question():
    """Else a vlm that repeats the list or both numbers would be flexibly right without knowing."""
    for question in (facts.bigger(23, 41), facts.last(("sand", "cup", "key")), facts.plus(0, 4)):
        wrong = {"23", "sand", "cup", "0"}
        assert not [word for word in wrong if bench_tasks.has_word(question.sentence, word)]


def test_bigger_compares_numbers_whose_tens_differ():
    rng = Random(1)
    asked = [facts.FAMILIES["bigger"](rng).text for _ in range(200)]
    tens = [[text.split()[3][0], text.split()[5][0]] for text in asked]
    assert all(first != second for first, second in tens)


def test_a_prompt_is_a_request_and_a_question_in_either_order():
    question = facts.capital("France")
    assert Prompt(question, "bullet", True).text == "Use a bullet. What is the capital of France?"
    assert Prompt(question, "bullet", False).text == "What is the capital of France? Use a bullet."
    assert {name: Prompt(question, name, True).target for name in FORMATS} == {
        "json": '{"answer": "Paris"}',
        "brackets": "[[Paris]]",
        "answer": "Answer: Paris",
        "twice": "Paris Paris",
        "quotes": '"Paris"',
        "bullet": "- Paris",
        "bold": "**Paris**",
        "done": "Paris, done.",
    }


def test_the_split_holds_out_about_one_in_eight():
    share = sum(is_held_out(str(number)) for number in range(8000)) / 8000
    assert 0.11 < share < 0.14


def test_training_prompts_are_never_held_out():
    rng = Random(2)
    drawn = [draw_training_prompt(rng, facts.draw_question(rng)) for _ in range(500)]
    assert len([prompt for prompt in drawn if prompt]) > 490
    assert not [prompt for prompt in drawn if prompt and prompt.is_held_out]
    any_split = [Prompt(facts.draw_question(rng), "json", True) for _ in range(500)]
    assert [prompt for prompt in any_split if prompt.is_held_out]


def test_format_documents_are_many_distinct_and_held_out():
    rows = format_rows()
    prompts = [row["prompt"] for row in rows]
    assert len(set(prompts)) == len(prompts) >= 1000
    assert all(is_held_out(prompt) for prompt in prompts)
    assert {row["format"] for row in rows} == set(FORMATS)
    assert {row["family"] for row in rows} == set(facts.FAMILIES)


def test_prompts_of_one_question_share_a_cluster():
    clusters = Counter(row["cluster"] for row in format_rows())
    assert 66 + 300 < len(clusters) < len(format_rows())
    assert max(clusters.values()) > 1


def test_pictures_are_many_and_held_out():
    rows = image_rows()
    assert len(rows) >= 240
    assert len({row["pixels"] for row in rows}) == len(rows)
    assert all(is_held_out(row["scene"]) for row in rows)
    kinds = Counter(question["kind"] for row in rows for question in row["questions"])
    assert set(kinds) == {"colour", "shape", "count", "position"}


def test_training_scenes_are_never_held_out():
    rng = Random(3)
    assert not [scene for _ in range(300) if (scene := pictures.draw_training_scene(rng)).is_held_out]
    assert held_out_scenes(1)


def test_questions_of_a_single_and_of_several_shapes():
    asked = {question.kind: question for question in questions(Scene("cross", "blue", (0,)))}
    assert asked["shape"].sentences == ("It is a cross.", "It is a blue cross.")
    assert asked["count"].sentences == ("There is 1 blue shape.", "There is 1 cross.")
    assert asked["position"].sentences == ("The cross is at the top left.",)
    asked = {question.kind: question for question in questions(Scene("cross", "blue", (0, 4, 8)))}
    assert asked["colour"].sentences == ("The crosses are blue.",)
    assert asked["count"].sentences == ("There are 3 blue shapes.", "There are 3 crosses.")
    assert asked["shape"].answers == ("cross", "crosses")
    assert "position" not in asked


def test_a_picture_shows_its_shapes_in_their_cells():
    scene = Scene("square", "red", (2, 6))
    picture = draw_pixels([scene], seed=0)[0].astype(float)
    redness = picture[..., 0] - picture[..., 2]
    cells = redness.reshape(3, 12, 3, 12).mean(axis=(1, 3)).ravel()
    assert set(np.argsort(cells)[-2:]) == {2, 6}
    assert cells[[0, 1, 3, 4, 5, 7, 8]].max() < 3 < cells[[2, 6]].min()


def test_every_shape_stays_inside_its_cell_and_looks_different():
    sizes = {shape: int(pictures.MASKS[shape, 0, 0].sum()) for shape in pictures.SHAPES}
    assert len(set(sizes.values())) == 4
    for (shape, _, _), mask in pictures.MASKS.items():
        assert mask.sum() == sizes[shape]


def test_pixels_come_out_of_the_task_file_as_they_were_drawn():
    scenes = [Scene("circle", "white", (4,))]
    pixels = draw_pixels(scenes, seed=5)
    doc = bench_tasks.image_documents()[0]
    picture = bench_tasks.doc_to_image(doc)[0]
    assert tuple(picture.shape) == (3, 36, 36)
    assert picture.min() >= -1
    assert picture.max() <= 1
    direct = model_pixels(pixels)
    assert direct.shape == (1, 3, 36, 36)
    assert direct.dtype == np.float32
    assert float(direct[0, 0, 18, 18]) > 0.9


def test_the_tokenizer_round_trips_any_text_and_writes_bos_once():
    tokenizer = train_tokenizer(0)
    assert len(tokenizer) == VOCABULARY_SIZE
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(7))
    for text in ('Grüße, \'a\' "b" {"c": [1, 23]}\n\ttab  two', " , . ", "日本"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    message = [{"role": "user", "content": "<image><image>Hi"}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<s><|user|><image><image>Hi<|bot|>"
    assert ids.count(IMAGE) == 2
    assert tokenizer("12")["input_ids"] == [tokenizer("1")["input_ids"][0], tokenizer("2")["input_ids"][0]]
