"""The shipped task folder: data made again byte for byte, and both tasks as lm-eval loads them."""

import pytest

from mergelab.bench.data.tasks import bench_tasks
from mergelab.bench.tasks import FORMAT_FILE, IMAGE_FILE, tasks_folder, write_task_data


@pytest.mark.parametrize("name", [FORMAT_FILE, IMAGE_FILE])
def test_shipped_data_equals_regenerated_data(tmp_path, name):
    write_task_data(tmp_path)
    assert (tmp_path / name).read_bytes() == (tasks_folder() / name).read_bytes()


def test_documents_are_what_the_yaml_functions_expect():
    text, image = bench_tasks.format_documents(), bench_tasks.image_documents()
    assert len(text) >= 1000
    assert len(image) >= 700
    assert bench_tasks.image_prompt(image[0]).count("<image>") == 9
    assert bench_tasks.grade_format(text[0], [bench_tasks.format_target(text[0])]) == {"strict": 1, "flexible": 1}
    assert bench_tasks.grade_image(image[0], [bench_tasks.image_target(image[0])]) == {
        "strict": 1,
        "flexible": 1,
    }


@pytest.mark.parametrize(
    "documents", [bench_tasks.format_documents, bench_tasks.image_documents], ids=["text", "image"]
)
def test_every_target_is_right_by_both_graders(documents):
    for doc in documents():
        targets = doc.get("sentences") or [doc["target"]]
        for target in targets:
            grade = bench_tasks.grade_image if "sentences" in doc else bench_tasks.grade_format
            assert grade(doc, [target]) == {"strict": 1, "flexible": 1}, doc


@pytest.mark.parametrize("name", ["bench_format", "bench_image"])
@pytest.mark.filterwarnings("ignore")
def test_lm_eval_loads_the_task_from_any_folder(tmp_path, monkeypatch, name):
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(tmp_path)
    manager = TaskManager(include_path=str(tasks_folder()), include_defaults=False)
    task = manager.load([name])["tasks"][name]
    docs = list(task.test_docs())
    assert len(docs) >= 700
    assert task.config.generation_kwargs == {"until": ["</s>"], "do_sample": False, "max_gen_toks": 24}
    assert task.process_results(docs[0], [task.doc_to_target(docs[0])]) == {"strict": 1, "flexible": 1}
    assert set(task.aggregation()) == {"strict", "flexible"}
