"""Wall time and peak memory of one merge from disk to disk: ``mergekit-yaml`` and ``mergelab merge`` in turn.

Both are run as users run them, as processes of their own, on the same three bf16 checkpoints of TinyLlama-1.1B's
shapes (seeded noise; base and vlm are the ancestor moved a little). Times are of the whole process: start, reading,
arithmetic, writing, and for mergelab the fsync that mergekit leaves out. mergekit computes in float32 (``dtype:
float32, out_dtype: bfloat16``) unless ``--mergekit-dtype bfloat16``, its default. The hashes of the inputs, which go
into mergelab's manifest, are remembered between its runs; the line above the table says what the first one took.
Peak memory is the kernel's figure of resident memory; it counts pages of files that a program maps, as mergekit does.

    python benchmarks/merge_to_disk.py --scratch /tmp/bench                    # on disk, 12 GB
    python benchmarks/merge_to_disk.py --scratch /dev/shm/bench                # on a memory file system
    python benchmarks/merge_to_disk.py --scratch /tmp/bench --width 1024 --layers 4 16 64   # memory against depth

Standard library only here: the peak memory that the kernel reports for a child begins with that of its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, VOCABULARY, LAYERS = 2048, 32000, 22
NOISE = {"ancestor": 0.0, "base": 1e-3, "vlm": 1.5e-3}
METHODS = {
    "task_arithmetic": {"lambda": 0.5},
    "dare_linear": {"drop_rate": 0.8, "lambda": 0.5},
    "ties": {"density": 0.2, "lambda": 0.5},
}
REPEATS = {"task_arithmetic": 3, "dare_linear": 2, "ties": 1}


@dataclass(frozen=True)
class Cost:
    """What one process took."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for models and results; 10 GB; kept")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--repeats", type=int, help="pairs of runs a method; default 3, 2 and 1")
    parser.add_argument("--layers", type=int, nargs="+", default=[LAYERS], help="several: mergelab's memory at each")
    parser.add_argument("--width", type=int, default=WIDTH, help="hidden size; a multiple of 256")
    parser.add_argument("--mergekit-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only-ours", action="store_true", help="leave mergekit out")
    parser.add_argument("--build", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.build:
        build(Path(arguments.build[0]), int(arguments.build[1]), int(arguments.build[2]))
        return
    trios = {layers: arguments.scratch / f"trio-{arguments.width}-{layers}" for layers in arguments.layers}
    for layers, trio in trios.items():
        if not (trio / "done").exists():
            size = [str(arguments.width), str(layers)]
            subprocess.run([sys.executable, __file__, "--scratch", ".", "--build", str(trio), *size], check=True)
    if len(trios) > 1:
        show_depths(trios, arguments.methods)
        return
    (trio,) = trios.values()
    shutil.rmtree(trio / "cache", ignore_errors=True)
    first = in_turn(trio, {"mergelab": our_command(trio, arguments.methods[0])}, 1)["mergelab"][0]
    print(f"mergelab's first {arguments.methods[0]}, with the hashes of its inputs: {first.seconds:.1f} s\n")
    print("| merge to disk | wall s, mergekit | mergelab | ratio | CPU s, mergekit | mergelab | ratio | ", end="")
    print(f"peak MB, mergekit | mergelab | ratio |\n|{'---|' * 10}", flush=True)
    apart = []
    for method in arguments.methods:
        commands = {"mergelab": our_command(trio, method)}
        if not arguments.only_ours:
            commands["mergekit"] = their_command(trio, method, arguments.mergekit_dtype)
        show_method(method, in_turn(trio, commands, arguments.repeats or REPEATS[method]))
        if len(commands) == 2 and arguments.mergekit_dtype == "float32" and "drop_rate" not in METHODS[method]:
            apart.append(f"{method}: {compare(trio)}")
    print("", *apart, sep="\n")


def shapes(width: int, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama of the proportions of TinyLlama-1.1B."""
    mlp, kv = width * 11 // 4, width // 8
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, width)}
    for layer in range(num_layers):
        start = f"model.layers.{layer}."
        found |= {f"{start}self_attn.{name}_proj.weight": (width, width) for name in "qo"}
        found |= {f"{start}self_attn.{name}_proj.weight": (kv, width) for name in "kv"}
        found |= {f"{start}mlp.{name}_proj.weight": (mlp, width) for name in ("gate", "up")}
        found[f"{start}mlp.down_proj.weight"] = (width, mlp)
        found |= {f"{start}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (width,), "lm_head.weight": (VOCABULARY, width)}


def build(folder: Path, width: int, num_layers: int) -> None:
    """Write the three checkpoints; called in a process of its own."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    shutil.rmtree(folder, ignore_errors=True)
    for role, noise in NOISE.items():
        tensors = {}
        for number, (name, shape) in enumerate(shapes(width, num_layers).items()):
            start = torch.randn(shape, generator=torch.Generator().manual_seed(number)).mul_(0.02)
            if noise:
                own = torch.Generator().manual_seed(10**6 * len(role) + number)
                start += torch.randn(shape, generator=own).mul_(noise)
            tensors[name] = start.to(torch.bfloat16)
        (folder / role).mkdir(parents=True)
        save_file(tensors, folder / role / "model.safetensors", metadata={"format": "pt"})
        (folder / role / "config.json").write_text(json.dumps(config))
    (folder / "done").touch()


def our_command(trio: Path, method: str) -> list[str]:
    recipe = trio / f"{method}.yaml"
    recipe.write_text(json.dumps({"name": method, "pair": "bench", "method": method, "parameters": METHODS[method]}))
    models = [text for role in ("base", "vlm", "ancestor") for text in (f"--{role}", str(trio / role))]
    start = [sys.executable, "-c", "from mergelab.cli import main; main()"]
    return [*start, "merge", str(recipe), *models, "--out", str(trio / "by-mergelab"), "--device", "cpu"]


def their_command(trio: Path, method: str, dtype: str) -> list[str]:
    parameters = dict(METHODS[method])
    if "drop_rate" in parameters:
        parameters["density"] = round(1 - parameters.pop("drop_rate"), 6)
    scale = parameters.pop("lambda")
    recipe = {
        "merge_method": method,
        "base_model": str(trio / "ancestor"),
        "models": [
            {"model": str(trio / role), "parameters": {"weight": 1.0, **parameters}} for role in ("base", "vlm")
        ],
        "parameters": {"lambda": scale},
        "dtype": dtype,
        "out_dtype": "bfloat16",
    }
    config = trio / f"{method}-mergekit.yaml"
    config.write_text(json.dumps(recipe))
    program = Path(sys.executable).with_name("mergekit-yaml")
    return [str(program), str(config), str(trio / "by-mergekit"), "--quiet", "--no-copy-tokenizer"]


def in_turn(trio: Path, commands: dict[str, list[str]], repeats: int) -> dict[str, list[Cost]]:
    """Run the commands alternately, so that a busy machine slows both; the folders of the last runs stay."""
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for turn in range(repeats):
        # Whoever is first finds a colder file cache, so they take turns at that too.
        for name in sorted(commands, reverse=turn % 2 == 1):
            shutil.rmtree(trio / f"by-{name}", ignore_errors=True)
            os.sync()
            costs[name].append(measured(commands[name], trio))
    return costs


def measured(command: Sequence[str], trio: Path) -> Cost:
    """Return wall time and the kernel's figure of the peak resident memory of a process."""
    environment = {**os.environ, "MERGELAB_CACHE_DIR": str(trio / "cache"), "HF_HUB_OFFLINE": "1"}
    with (trio / "log").open("wb") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{(trio / 'log').read_text()[-3000:]}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def show_method(method: str, costs: dict[str, list[Cost]]) -> None:
    """Print one row: medians, and ratios where both ran (times: mergekit / mergelab, memory: mergelab / mergekit)."""
    cells = [method]
    for field, scale, digits in (("seconds", 1, 1), ("cpu_seconds", 1, 1), ("peak_bytes", 1e6, 0)):
        ours, theirs = (
            statistics.median(getattr(cost, field) for cost in costs[name]) / scale if name in costs else None
            for name in ("mergelab", "mergekit")
        )
        ratio = None if theirs is None else ours / theirs if field == "peak_bytes" else theirs / ours
        cells += ["" if value is None else f"{value:.{digits}f}" for value in (theirs, ours)]
        cells.append("" if ratio is None else f"{ratio:.2f}")
    print(f"| {' | '.join(cells)} |", flush=True)


def show_depths(trios: dict[int, Path], methods: Sequence[str]) -> None:
    print(f"| mergelab, peak MB | {' | '.join(f'{depth} layers' for depth in trios)} |")
    print(f"|---{'|---' * len(trios)}|", flush=True)
    for method in methods:
        peaks = []
        for trio in trios.values():
            costs = in_turn(trio, {"mergelab": our_command(trio, method)}, 1)
            peaks.append(f"{costs['mergelab'][0].peak_bytes / 1e6:.0f}")
            shutil.rmtree(trio / "by-mergelab")
        print(f"| {method} | {' | '.join(peaks)} |", flush=True)


def compare(trio: Path) -> str:
    """Say in how many entries the last two results differ: the same tensors, in files of their own layout."""
    program = (
        "import sys; from safetensors import safe_open\n"
        "one, two = (safe_open(f'{folder}/model.safetensors', 'pt') for folder in sys.argv[1:])\n"
        "names = sorted(one.keys()); assert names == sorted(two.keys())\n"
        "apart = sum(int((one.get_tensor(n) != two.get_tensor(n)).sum()) for n in names)\n"
        "print(f'{apart} of {sum(one.get_tensor(n).numel() for n in names)} entries differ')\n"
    )
    command = [sys.executable, "-c", program, str(trio / "by-mergelab"), str(trio / "by-mergekit")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
