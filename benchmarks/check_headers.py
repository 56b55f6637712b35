"""Time and memory of ``mergelab check`` before the digest: 1,000 tensors a side, tokenizers of 151,665 tokens.

Run by hand on Linux: ``OMP_NUM_THREADS=1 python benchmarks/check_headers.py``. Every run is a process of its own, from
the start of Python to the finished record.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 3
NUM_LAYERS = 90
NUM_TOKENS, NUM_MERGES, NUM_ADDED = 151_643, 151_387, 22

CHECK = """
import sys, time
from pathlib import Path
from mergelab.config import pair_from_folders
from mergelab.sweeps.check import check_record
from mergelab.sweeps.models import open_models
record = check_record(open_models(pair_from_folders(sys.argv[1] + "/base", sys.argv[1] + "/vlm")))
# ru_maxrss would count the parent, which this process was forked from.
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
print(f"{record['merged']} tensors pair, {record['tokens']['num_shared']} tokens: {time.process_time():.2f} s of")
print(f"  processor time, {peak:.0f} MB at most, torch imported: {'torch' in sys.modules}")
"""


def build(root: Path) -> None:
    import torch
    from safetensors.torch import save_file

    rng = random.Random(0)
    vocabulary: dict[str, int] = {}
    while len(vocabulary) < NUM_TOKENS:
        vocabulary["".join(rng.choices("abcdefghijklmnopqrstuvwxyzĠéü", k=rng.randrange(1, 10)))] = len(vocabulary)
    vocabulary = {token: row for row, token in enumerate(vocabulary)}
    tokens = list(vocabulary)
    added = [{"id": NUM_TOKENS + number, "content": f"<|{number}|>", "special": True} for number in range(NUM_ADDED)]
    model = {"type": "BPE", "vocab": vocabulary, "merges": [rng.choices(tokens, k=2) for _ in range(NUM_MERGES)]}
    leaves = [f"self_attn.{name}_proj.weight" for name in "qkvo"] + [f"self_attn.{name}_norm.weight" for name in "qk"]
    leaves += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    leaves += [f"{name}_layernorm.weight" for name in ("input", "post_attention")]
    names = [f"model.layers.{layer}.{leaf}" for layer in range(NUM_LAYERS) for leaf in leaves]
    shapes = {name: (8,) if "norm" in name else (8, 8) for name in names}
    shapes |= {"model.embed_tokens.weight": (64, 8), "model.norm.weight": (8,), "lm_head.weight": (64, 8)}
    for role in ("base", "vlm"):
        folder = root / role
        folder.mkdir()
        save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": model}, ensure_ascii=False))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for _ in range(RUNS):
            subprocess.run([sys.executable, "-c", CHECK, folder], check=True)


if __name__ == "__main__":
    main()
