"""What a run would miss on this machine is told at once, without the network, with how to get it."""

import json
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mergelab import device
from mergelab.checkpoints import output_folder
from mergelab.cli import main
from tests.builders import tiny_llama, tiny_llava
from tests.evals.picture_models import chart_documents

DISK = namedtuple("DISK", "total used free")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def checks(result: Result) -> dict[str, dict[str, Any]]:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return {check["what"]: check for check in json.loads(result.stdout)}


def test_shipped_recipe_lacks_nothing(no_network: None) -> None:
    result = call("doctor", "ties", "--json", "--device", "cpu")
    found = checks(result)
    assert result.exit_code == 0, result.output
    assert all(check["ok"] for check in found.values())
    expected = {"device", "model ancestor", "model base", "model vlm", "pairing", "models fit the recipe", "disk"}
    expected |= {"tokenizer base", "tokenizer vlm", "prompts", "evals", "chat template"}
    assert set(found) == expected | {"task bench_format", "task bench_image"}
    assert found["task bench_format"]["found"].startswith("n = ")


def test_everything_missing_is_listed_at_once(
    no_network: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "visible_gpus", lambda: ["0000:01:00.0"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    settings = ("--set", "evals.tasks=[gsm8k, ifeval]", "--set", f"evals.data.ifeval={tmp_path / 'torn.jsonl'}")
    (tmp_path / "torn.jsonl").write_text("{")
    base = tiny_llama(tmp_path / "base")
    result = call("doctor", "task_arithmetic", "--base", base, "--vlm", "no-one/no-vlm", *settings, "--json")
    found = checks(result)
    assert result.exit_code == 6
    missing = {what: check for what, check in found.items() if not check["ok"]}
    assert set(missing) == {"device", "model vlm", "task gsm8k", "task ifeval"}
    assert "cannot use them" in missing["device"]["found"]
    assert "hf download no-one/no-vlm --local-dir DIR" in missing["model vlm"]["offline"]
    assert "HF_HUB_OFFLINE" not in json.dumps(found)
    assert "question, answer" in missing["task gsm8k"]["offline"]
    assert "torn.jsonl: 1 lines" in missing["task ifeval"]["found"]
    assert found["checkers of IFEval"]["ok"] and found["tokenizer base"]["ok"]
    table = call("doctor", "task_arithmetic", "--base", base, "--vlm", "no-one/no-vlm", *settings)
    assert table.exit_code == 6 and "4 of" in table.stderr and "missing" in table.stdout


def test_one_kind_of_error_keeps_its_exit_code(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", seed=1)
    vlm = tiny_llava(tmp_path / "vlm", start=base)
    (base / "tokenizer.json").unlink()
    data = tmp_path / "ifeval.jsonl"
    data.write_text('{"key": 0, "prompt": "a", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}\n')
    settings = ("--set", "evals.tasks=[ifeval]", "--set", f"evals.data.ifeval={data}")
    result = call("doctor", "task_arithmetic", "--base", base, "--vlm", vlm, *settings, "--json", "--device", "cpu")
    assert [what for what, check in checks(result).items() if not check["ok"]] == ["tokenizer base"]
    assert result.exit_code == 5


def test_disk_that_cannot_keep_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda place: DISK(10**9, 10**9, 1000))
    keep = ("--set", "keep_weights=always", "--out", tmp_path / "run", "--device", "cpu")
    result = call("doctor", "ties", *keep, "--json")
    assert result.exit_code == 6
    assert [what for what, check in checks(result).items() if not check["ok"]] == ["disk"]
    run = call("run", "ties", *keep)
    assert run.exit_code == 6 and "GB of disk space" in run.stderr
    assert not (tmp_path / "run").exists()
    assert call("doctor", "ties", "--out", tmp_path / "run", "--device", "cpu").exit_code == 0


def test_gpu_that_torch_cannot_use_stops_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(device, "visible_gpus", lambda: ["0000:01:00.0"])
    result = call("run", "ties", "--out", tmp_path / "run")
    assert result.exit_code == 6
    assert "say --device cpu" in result.stderr
    assert device.choose_device("cpu") == "cpu"


def test_gpus_are_seen_without_torch_and_can_be_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "0000:01:00.0").mkdir()
    assert device.visible_gpus(tmp_path) == ["0000:01:00.0"]
    assert device.visible_gpus(tmp_path / "none") == []
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert device.visible_gpus(tmp_path) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert device.visible_gpus(tmp_path) == ["0000:01:00.0"]


def test_picture_task_for_a_text_model_is_named_by_doctor_and_run(tmp_path: Path) -> None:
    base, text = tiny_llama(tmp_path / "base"), tiny_llama(tmp_path / "text", seed=2)
    data = f"evals.data.chartqa={chart_documents(tmp_path)}"
    settings = ("--set", "evals.tasks=[chartqa]", "--set", data, "--device", "cpu")
    asked = ("task_arithmetic", "--base", base, "--vlm", text, *settings)
    found = checks(call("doctor", *asked, "--json"))
    assert "a text model cannot see the pictures of chartqa" in found["task chartqa"]["found"]
    run = call("run", *asked, "--accept-unrelated", "--out", tmp_path / "run")
    assert run.exit_code == 3 and "cannot see the pictures of chartqa" in run.stderr, run.stderr
