"""A tiny real vlm with a real processor, and documents with real pictures."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.builders import IMAGE_TOKEN, TEXT_SIZE, WORDS, tiny_llama, tiny_llava, write_tokenizer

TOKENS = (*WORDS, IMAGE_TOKEN, "A", "B", "C", "(A)", "(B)", "Final", "Answer:", "4", "7")
"""The tiny tokenizer's, with what the graders look for: 32."""

PICTURE_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{{ '<image> ' if c['type'] == 'image' else c['text'] + ' ' }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} answer : {% endif %}"
)
COLOURS = {"red": (220, 20, 20), "green": (20, 220, 20), "blue": (20, 20, 220)}
SIZE = {"max_position_embeddings": 1024}


def tiny_base(folder: Path, vlm: Path | None = None, noise: float = 1.0) -> Path:
    """Write a tiny text model; with a vlm, its tower's weights moved by seeded noise."""
    if vlm is not None:
        stored = load_file(vlm / "model.safetensors")
        tower = {name.removeprefix("language_model."): t for name, t in stored.items() if "language_model" in name}
        start = folder.parent / f"{folder.name}-start"
        start.mkdir()
        save_file(tower, start / "model.safetensors")
    return tiny_llama(folder, tokens=TOKENS, start=start if vlm else None, noise=noise, seed=1, **SIZE)


def seeing_llava(folder: Path, **settings: Any) -> Path:
    """Write a tiny LLaVA whose answers depend on what it is shown, with its processor."""
    tiny_llava(folder, tokens=TOKENS, **SIZE, **settings)
    write_processor(folder)
    teach(folder)
    return folder


def teach(folder: Path, steps: int = 90) -> None:
    """Train the vlm in place to name the colour of a plain picture after a long prompt, in ChartQA's form."""
    processor = AutoProcessor.from_pretrained(folder)
    model = LlavaForConditionalGeneration.from_pretrained(folder).float()
    filler = " ".join(["zzz"] * 90)
    prompts = [f"user : <image> what is {word} ? {filler} answer : " for word in ("cat", "dog", "two") for _ in COLOURS]
    answers = [f"Final Answer: {colour} </s>" for colour in COLOURS] * 3
    images = [Image.open(io.BytesIO(picture(colour))) for colour in COLOURS] * 3
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    batch = processor(text=texts, images=images, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    labels[:, :-4] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    for _ in range(steps):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def write_processor(folder: Path, template: str = PICTURE_TEMPLATE) -> None:
    write_tokenizer(folder, TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(folder)


QWEN_TOKENS = (*WORDS, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "A", "Answer:", "4", "7")


def seeing_qwen(folder: Path) -> Path:
    """Write a tiny random Qwen2-VL with its processor, which takes pictures of any size; needs torchvision."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    ids = {token: number for number, token in enumerate(QWEN_TOKENS)}
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 1, 0]}
    torch.manual_seed(1)
    vision = {"depth": 1, "num_heads": 2, "embed_dim": 16, "hidden_size": 16, "patch_size": 4, "spatial_merge_size": 2}
    config = Qwen2VLConfig(
        text_config={**TEXT_SIZE, **SIZE, "rope_parameters": rope},
        vision_config={**vision, "temporal_patch_size": 2},
        tie_word_embeddings=False,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    model = Qwen2VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data *= 14 if "visual" in name else 8
    model.save_pretrained(folder)
    write_tokenizer(folder, QWEN_TOKENS)
    template = PICTURE_TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    size = {
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    }
    pictures, videos = Qwen2VLImageProcessor(**size), Qwen2VLVideoProcessor(**size)
    Qwen2VLProcessor(pictures, tokenizer, videos, chat_template=template).save_pretrained(folder)
    return folder


def picture(colour: str, size: int = 12) -> bytes:
    """Return a PNG of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), COLOURS[colour]).save(buffer, format="PNG")
    return buffer.getvalue()


def chart_documents(folder: Path, number: int = 12) -> Path:
    """Write ChartQA documents, two questions a picture, the pictures as files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for place in range(number):
        colour, size = list(COLOURS)[place // 2 % 3], 10 + place // 2
        name = f"chart{place // 2}.png"
        (folder / name).write_bytes(picture(colour, size))
        label = "two" if place == 3 else colour  # one that is not to be seen there
        rows.append({"query": f"what is {WORDS[4 + place % 9]} ?", "label": [label], "image": name})
    path = folder / "chartqa.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mmmu_documents(folder: Path) -> Path:
    """Write MMMU documents of two subjects: base64 pictures, one of two pictures, an open question."""
    rows = [
        mmmu_row("Accounting", "<image 1> what is the colour ?", ["cat", "red", "dog"], "B", red=1),
        mmmu_row("Art", "what is <image 1> and <image 2> ?", ["green", "red"], "A", red=1, green=2),
        mmmu_row("Art", "the colour of <image 1> ?", ["dog", "green", "one"], "C", green=1),
        mmmu_row("Accounting", "name the colour of <image 1>", None, "blue", blue=1),
        mmmu_row("Art_Theory", "one two three <image 1> cat ?", ["two", "three"], "A", blue=1),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mmmu.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mmmu_row(subject: str, question: str, options: list[str] | None, answer: str, **colours: int) -> dict[str, Any]:
    return {
        "id": f"validation_{subject}_1",
        "subject": subject,
        "question": question,
        "options": str(options or []),
        "question_type": "multiple-choice" if options else "open",
        "answer": answer,
        **{f"image_{n}": base64.b64encode(picture(colour)).decode() for colour, n in colours.items()},
    }
