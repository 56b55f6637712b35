"""Documents that lm-eval makes itself: the same every time and everywhere, with a tokenizer that can make them."""

import importlib.util
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mergelab.errors import MachineError, RecipeError
from mergelab.evals.building import offline
from mergelab.evals.making import SEEDS, made_with
from mergelab.evals.quiet import quiet
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import load_suite
from mergelab.evals.tasks import TASKS
from tests.evals.scripted import byte_tokenizer

needs_ruler = pytest.mark.skipif(
    importlib.util.find_spec("wonderwords") is None, reason="needs the extra: pip install 'mergelab[ruler]'"
)
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "One of the special magic numbers for is: What are all the mentioned in the provided text?",
]
NIAH = TASKS["niah_single_1"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    trained.train_from_iterator(
        SENTENCES * 9, trainers.BpeTrainer(special_tokens=["<unk>", "</s>"], show_progress=False)
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    return folder


def test_generators_are_seeded_for_the_making_and_put_back(tokenizer):
    random.seed(77)
    np.random.seed(77)
    before = random.getstate(), np.random.get_state()[1].tolist()
    drawn = []
    for _ in range(2):
        config = {"metadata": {"version": 1.0}}
        with made_with(NIAH, config, tokenizer):
            drawn.append((random.random(), np.random.random()))
        assert config["metadata"] == {"version": 1.0, "tokenizer": str(tokenizer)}
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert (
        drawn[0] == drawn[1] == (random.Random(SEEDS["random"]).random(), np.random.RandomState(1234).random_sample())
    )


def test_code_of_a_tokenizer_does_not_run(tokenizer, monkeypatch):
    asked = []
    real = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **named: asked.append(named) or real(*a, **named))
    with made_with(NIAH, {}, tokenizer):
        AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=True)
    assert all(named == {"local_files_only": True, "trust_remote_code": False} for named in asked) and len(asked) == 2


def test_network_is_not_asked_while_it_is_forbidden(tokenizer):
    import requests

    with offline(), made_with(NIAH, {}, tokenizer), pytest.raises(ConnectionError, match="network is forbidden"):
        requests.get("https://example.org", timeout=1)


def test_tokenizer_is_required_and_must_not_cut_words_into_bytes(tmp_path):
    with pytest.raises(RecipeError, match="there is no tokenizer to count them"), made_with(NIAH, {}, None):
        pass
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"needs 44 tokens .* expected at most 20"), made_with(NIAH, {}, tmp_path):
        pass


def test_other_tasks_are_left_alone():
    config = {}
    with made_with(TASKS["gsm8k"], config, None):
        pass
    assert config == {}


@needs_ruler
def test_documents_equal_those_of_plain_lm_eval(tokenizer):
    request = EvalRequest("paper-instruct-v1", tasks=("niah_single_1",), tokenizer=tokenizer)
    suite = load_suite(request)
    from lm_eval.tasks.ruler.niah_utils import niah_single_1

    random.seed(0)  # as simple_evaluate does before it loads tasks
    with quiet():
        plain = niah_single_1(tokenizer=str(tokenizer))["test"]
    assert list(suite.tasks[0].documents()) == [dict(document) for document in plain]
    assert suite.tasks[0].n == 500
    assert load_suite(request).tasks[0].stage == suite.tasks[0].stage


@needs_ruler
def test_data_set_of_the_haystack_is_named_when_it_is_not_here(tokenizer):
    request = EvalRequest("paper-instruct-v1", tasks=("niah_single_2",), tokenizer=tokenizer)
    with pytest.raises(MachineError, match=r"data set of essays or questions is not on this machine .* evals\.data"):
        load_suite(request)
