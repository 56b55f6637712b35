"""vLLM as an engine: in this process, on one device, greedy, with weights that can be overwritten where it keeps them.

Read against vLLM 0.32 and run with its CPU build. What was learned there and decides the shape of this file:

- ``collective_rpc("reload_weights", weights_iterator=...)`` takes tensors by the names of a text checkpoint; in
  one process they are handed over as they are.
- Keys and values of known prompts outlive an update: ``reset_prefix_cache`` after each.
- On a CPU the engine repacks its weights and drops the originals, and the packed copy of a tied head keeps its
  start values through an update. ``content`` then is None: such an engine is built anew for every point.
- Its defaults come from the model's ``generation_config.json``; nothing of that is wanted.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mergelab.errors import MachineError
from mergelab.evals.engines import Completion, Content, EngineSetup, Stops, weights_content

if TYPE_CHECKING:
    from torch import Tensor

ADVICE = "Use evals.backend: hf, which needs nothing more."

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over in memory, and scheduling is repeatable
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

CPU_CACHE_BYTES = 512 << 20
"""Room for keys and values on a CPU, where vLLM's share of the memory would be most of the machine."""

MEMORY_SHARE = 0.9
"""Of the memory that is free on a GPU once the live model lies there."""


def require_vllm(device: str) -> str:
    """Return vLLM's version.

    Args:
        device: A torch device that exists.

    Raises:
        MachineError: vLLM is not installed, cannot be imported, or was built for another kind of device.
    """
    if find_spec("vllm") is None:
        raise MachineError(
            f"evals.backend vllm: vLLM is not installed. Install with: pip install 'mergelab[vllm]'. {ADVICE}"
        )
    _prepare_environment()
    try:
        import vllm
        from vllm.platforms import current_platform

        built_for, version = str(current_platform.device_type), str(vllm.__version__)
    except Exception as error:  # a build that does not fit torch or the driver fails in many ways
        raise MachineError(
            f"evals.backend vllm: vLLM is installed but cannot be used ({type(error).__name__}: {error}). Install the "
            f"build that fits this machine's torch. {ADVICE}"
        ) from error
    if built_for != device.partition(":")[0]:
        raise MachineError(
            f"evals.backend vllm: the models are on {device}, and this vLLM {version} finds "
            f"{built_for or 'no device that it can use'}. The ordinary build needs an NVIDIA GPU. {ADVICE}"
        )
    if device not in ("cpu", "cuda", "cuda:0"):
        raise MachineError(
            f"evals.backend vllm: the engine takes the first GPU that it sees, not {device}. "
            f"Set CUDA_VISIBLE_DEVICES={device.partition(':')[2]} and say --device cuda."
        )
    return version


class VllmEngine:
    """One vLLM engine in this process.

    Args:
        setup: What it is built from.
        with_weights: False leaves the weights of the folder unread; ``load`` must come first.

    Raises:
        MachineError: The engine cannot be built: an unknown architecture, too little memory.
    """

    def __init__(self, setup: EngineSetup, with_weights: bool = True) -> None:
        _prepare_environment()
        self.max_length = setup.max_length
        self._is_cpu = setup.device == "cpu"
        with _named_failures("cannot be started"), _torch_left_as_it_was():
            from vllm import LLM

            self._llm: Any = LLM(
                model=str(setup.folder),
                tokenizer=str(setup.tokenizer),
                load_format="auto" if with_weights else "dummy",
                dtype=setup.dtype,
                max_model_len=setup.max_length,
                max_num_seqs=setup.batch_size,
                generation_config="vllm",
                enable_prefix_caching=True,
                enforce_eager=self._is_cpu,
                seed=0,
                trust_remote_code=False,
                disable_log_stats=True,
                **({"kv_cache_memory_bytes": CPU_CACHE_BYTES} if self._is_cpu else _memory(setup.device)),
            )

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stops: Stops) -> list[Completion]:
        """Continue each prompt greedily."""
        from vllm import SamplingParams

        settings = SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            ignore_eos=True,  # the stop ids below are all there are
            stop_token_ids=list(stops.ids),
            stop=list(stops.strings),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        )
        return [_completion(output.outputs[0], stops) for output in self._run(prompts, settings)]

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Return log-likelihoods of continuations; a token of the room goes to the one that vLLM must write."""
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        whole = [[*context, *continuation][-(self.max_length - 1) :] for context, continuation in pairs]
        scores = []
        for (_, continuation), ids, output in zip(pairs, whole, self._run(whole, settings), strict=True):
            # The first token of all has no probability.
            start = max(1, len(ids) - len(continuation))
            found = [output.prompt_logprobs[place][ids[place]] for place in range(start, len(ids))]
            scores.append((float(sum(one.logprob for one in found)), all(one.rank == 1 for one in found)))
        return scores

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite all weights in place and forget the keys and values of the former ones."""
        with _named_failures("cannot take new weights"):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("its prefix cache could not be emptied")

    def content(self) -> Content | None:
        """Return what the weights add up to; None on a CPU, where they are repacked out of sight."""
        if self._is_cpu:
            return None
        with _named_failures("does not show its weights"):
            found = self._llm.apply_model(_content_of)
        return found[0] if len(found) == 1 else None

    def close(self) -> None:
        """Shut the engine down and give its memory back."""
        import torch

        engine, self._llm = self._llm, None
        with contextlib.suppress(Exception):  # whatever state a failed engine is in
            engine.llm_engine.engine_core.shutdown()
        del engine
        with contextlib.suppress(Exception):
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run(self, prompts: Sequence[Sequence[int]], settings: Any) -> list[Any]:
        from vllm import TokensPrompt

        with _named_failures("failed while it answered"):
            asked = [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts]
            return list(self._llm.generate(asked, settings, use_tqdm=False))


def open_vllm(setup: EngineSetup) -> VllmEngine:
    """Build an engine on a folder with weights."""
    return VllmEngine(setup)


def open_resident_vllm(setup: EngineSetup) -> VllmEngine:
    """Build an engine that waits for its weights."""
    return VllmEngine(setup, with_weights=False)


def _completion(output: Any, stops: Stops) -> Completion:
    ids = tuple(int(token) for token in output.token_ids)
    if output.finish_reason == "length":
        return Completion(ids, "length")
    if output.finish_reason != "stop":
        raise MachineError(f"the vLLM engine gave an answer up ({output.finish_reason}). {ADVICE}")
    is_end = not isinstance(output.stop_reason, str) and bool(ids) and ids[-1] in stops.ids
    return Completion(ids, "end" if is_end else "stop")


def _content_of(model: Any) -> Content:
    """Run inside the engine: ``apply_model`` hands over its module."""
    return weights_content(parameter.data for parameter in model.parameters())


def _memory(device: str) -> dict[str, float]:
    """Return the share of a GPU's memory that may be taken: of what is free, as vLLM counts it, of all."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_memory_utilization": MEMORY_SHARE * free / total}


def _prepare_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def _named_failures(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise MachineError(f"the vLLM engine {what} ({type(error).__name__}: {first}). {ADVICE}") from error


@contextlib.contextmanager
def _torch_left_as_it_was() -> Iterator[None]:
    """Keep torch's own switch for threads: on a CPU vLLM replaces it for the whole process."""
    import torch

    before = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = before
