"""Near misses that a lenient grader would forgive, through the real tasks: (answer, strict, flexible)."""

import pytest

from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import load_suite
from tests.evals.scripted import ScriptedModel, gsm8k, write_jsonl

GSM8K = {
    "asked form": ("So 3 + 4 = 7. The answer is 7.", 1, 1),
    "bold": ("The answer is **7**.", 0, 1),
    "lower case": ("the answer is 7.", 0, 1),
    "colon": ("The answer is: 7.", 0, 1),
    "marker of another task": ("#### 7", 0, 1),
    "number last": ("We get 7", 0, 1),
    "number then another": ("It is 7, one less than 8", 0, 0),
    "first match counts": ("The answer is 8. No: The answer is 7.", 0, 1),
    "spelled out": ("The answer is seven.", 0, 0),
    "money": ("The answer is $7.", 0, 1),
    "empty": ("", 0, 0),
}

THREE = {"relation": "at least", "num_sentences": 3}
GERMAN = {"language": "de"}
TWO = {"num_placeholders": 2}
IFEVAL = {
    "no comma": ("punctuation:no_comma", {}, "plain words", 1, 1),
    "comma": ("punctuation:no_comma", {}, "plain, words", 0, 0),
    "comma in a preamble": ("punctuation:no_comma", {}, "Sure, here it is\nplain words", 0, 1),
    "json": ("detectable_format:json_format", {}, '{"a": 1}', 1, 1),
    "fenced json": ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', 1, 1),
    "json and a word": ("detectable_format:json_format", {}, 'Here:\n{"a": 1}', 0, 1),
    "quoted": ("startend:quotation", {}, '"all of it"', 1, 1),
    "half quoted": ("startend:quotation", {}, '"all" of it', 0, 0),
    "bold quoted": ("startend:quotation", {}, '**"all of it"**', 0, 1),
    "three sentences": ("length_constraints:number_sentences", THREE,
                        "One. Two! Is it three?", 1, 1),
    "abbreviations": ("length_constraints:number_sentences", THREE,
                      "Mr. Smith of the U.S. Navy came. He left.", 0, 0),
    "german": ("language:response_language", GERMAN, "Das ist ein deutscher Satz für dich.", 1, 1),
    "not german": ("language:response_language", GERMAN, "This is an ordinary English sentence.", 0, 0),
    "placeholders": ("detectable_content:number_placeholders", TWO, "[a] and [b]", 1, 1),
    "one placeholder": ("detectable_content:number_placeholders", TWO, "[a] and (b)", 0, 0),
    "end phrase": ("startend:end_checker", {"end_phrase": "the end"}, "It is the end", 1, 1),
    "end phrase and more": ("startend:end_checker", {"end_phrase": "the end"}, "It is the end\nBye", 0, 1),
    "empty": ("punctuation:no_comma", {}, "", 0, 0),
}  # fmt: skip

MMLU_PRO = {
    "asked form": ("The answer is (B).", 1),
    "without brackets": ("the answer is B", 1),
    "bold": ("The answer is **B**", 0),
    "letter only": ("B", 0),
    "lower case": ("The answer is (b).", 0),
    "first counts": ("The answer is (A), no, the answer is (B).", 0),
}


def grade(folder, task, documents, answers):
    request = EvalRequest(
        "paper-instruct-v1",
        tasks=(task,),
        data={task: write_jsonl(folder / f"{task}.jsonl", documents)},
        max_gen_toks={task: 80},
    )
    model = ScriptedModel({f"[{name}]": answer for name, answer in answers.items()})
    samples = load_suite(request).evaluate(task, model, model.tokenizer).samples
    return {name: (sample["strict"], sample["flexible"]) for name, sample in zip(answers, samples, strict=True)}


@pytest.fixture(scope="module")
def gsm8k_grades(tmp_path_factory):
    documents = gsm8k(*((f"[{name}]", "7") for name in GSM8K))
    answers = {name: answer for name, (answer, _, _) in GSM8K.items()}
    return grade(tmp_path_factory.mktemp("gsm8k"), "gsm8k_cot_zeroshot", documents, answers)


@pytest.mark.parametrize("case", GSM8K)
def test_gsm8k_grades_near_misses(gsm8k_grades, case):
    assert gsm8k_grades[case] == GSM8K[case][1:]


@pytest.fixture(scope="module")
def ifeval_grades(tmp_path_factory):
    documents = [
        {"key": 1, "prompt": f"[{name}]", "instruction_id_list": [instruction], "kwargs": [settings]}
        for name, (instruction, settings, *_) in IFEVAL.items()
    ]
    answers = {name: case[2] for name, case in IFEVAL.items()}
    return grade(tmp_path_factory.mktemp("ifeval"), "ifeval", documents, answers)


@pytest.mark.parametrize("case", IFEVAL)
def test_ifeval_grades_near_misses(ifeval_grades, case):
    assert ifeval_grades[case] == IFEVAL[case][3:]


@pytest.fixture(scope="module")
def mmlu_pro_grades(tmp_path_factory):
    documents = [
        {"question": f"[{name}]", "options": ["x", "y"], "answer": "B", "category": "law", "cot_content": ""}
        for name in MMLU_PRO
    ]
    answers = {name: answer for name, (answer, _) in MMLU_PRO.items()}
    return grade(tmp_path_factory.mktemp("mmlu_pro"), "mmlu_pro", documents, answers)


@pytest.mark.parametrize("case", MMLU_PRO)
def test_mmlu_pro_grades_near_misses(mmlu_pro_grades, case):
    assert mmlu_pro_grades[case] == (MMLU_PRO[case][1], None)
