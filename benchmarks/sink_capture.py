"""Time and memory of the sink capture against a plain sdpa forward and against attention maps.

Run by hand on Linux: ``python benchmarks/sink_capture.py`` (some minutes on one core, about 6 GB). It prints
ratios, which travel between machines better than seconds; each memory figure comes from a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mergelab.sinks.capture import capturing

NUM_LAYERS = 30
LAST_LAYERS = 10


def build(max_tokens: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=max_tokens,
    )
    return LlamaForCausalLM(config).eval()


def tokens(num_tokens: int) -> list[int]:
    return torch.randint(4096, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()


def plain(model: LlamaForCausalLM, token_ids: list[int], output_attentions: bool = False) -> None:
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            output_attentions=output_attentions,
        )


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def time_ratio(num_tokens: int, repeats: int) -> dict[str, float]:
    """Alternate plain and captured forwards, so that a busy machine slows both."""
    model, token_ids = build(num_tokens), tokens(num_tokens)
    plain_s, captured_s = [], []
    with capturing(model, token_ids) as capture:
        layers = capture.layers[-LAST_LAYERS:]
        for _ in range(repeats + 1):
            plain_s.append(seconds_of(lambda: plain(model, token_ids)))
            captured_s.append(seconds_of(lambda: capture.rows(token_ids, layers)))
    ratios = [captured / bare for captured, bare in zip(captured_s[1:], plain_s[1:], strict=True)]
    return {"plain_s": statistics.median(plain_s[1:]), "ratio": statistics.median(ratios)}


def resident_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def peak_growth(way: str, num_tokens: int) -> float:
    """Return by how many MB the peak rises above what the loaded model holds; one call a process."""
    model, token_ids = build(num_tokens), tokens(num_tokens)
    plain(model, token_ids[:8])
    # The peak of building the model would hide a smaller one of the pass, so reset the mark.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mb("VmRSS")
    if way == "capture":
        with capturing(model, token_ids) as capture:
            capture.rows(token_ids, capture.layers[-LAST_LAYERS:])
    else:
        model.set_attn_implementation("eager" if way == "maps" else "sdpa")
        plain(model, token_ids, output_attentions=way == "maps")
    return resident_mb("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="prompt length of the memory comparison")
    parser.add_argument("--memory-of", choices=["plain", "capture", "maps"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_of:
        print(json.dumps(peak_growth(arguments.memory_of, arguments.tokens)))
        return
    for num_tokens, repeats in ((64, 15), (1024, 5)):
        timing = time_ratio(num_tokens, repeats)
        print(f"T={num_tokens}: plain sdpa {timing['plain_s']:.3f} s, captured {timing['ratio']:.2f} times that")
    peaks = {}
    for way in ("plain", "capture", "maps"):
        command = [sys.executable, __file__, "--memory-of", way, "--tokens", str(arguments.tokens)]
        peaks[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"T={arguments.tokens}: {way} grows the peak by {peaks[way]:.0f} MB")
    print(f"T={arguments.tokens}: maps / capture = {peaks['maps'] / peaks['capture']:.1f} in peak memory")


if __name__ == "__main__":
    main()
