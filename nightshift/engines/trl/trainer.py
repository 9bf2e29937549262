"""The child process of the trl engine: `python -m nightshift.engines.trl.trainer SPEC.json`.

Commands arrive as JSON lines on stdin, events leave as JSON lines on stdout; everything that a library
prints goes to stderr, the run's log. Any failure is one `error` event with its cause, a traceback on
stderr, and exit code 1. Of nightshift it imports what a run needs only.
"""

import copy
import gc
import hashlib
import json
import os
import resource
import select
import shutil
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO


def main() -> int:
    """Take over the pipes, get ready, obey; the exit code."""
    # Libraries may print to stdout while they are imported, so it becomes the log before anything else.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    gc.disable()  # imports make little garbage, and looking for it took a quarter of the start
    try:
        spec = json.loads(Path(sys.argv[1]).read_text())
        trainer = Trainer(spec, events)
        gc.freeze()
        gc.enable()
        for line in sys.stdin.buffer:
            trainer.obey(json.loads(line))
    except Exception as error:
        traceback.print_exc()
        cause = " ".join(str(error).split()) or type(error).__name__
        is_environment = type(error).__name__ == "EngineError"  # of nightshift, of which nothing is loaded up here
        _send(events, {"event": "error", "cause": cause, "is_machinery": is_environment})
        return 1
    return 0


class Trainer:
    """A policy with its trainer; one method a command."""

    def __init__(self, spec: Mapping[str, Any], events: TextIO) -> None:
        from nightshift.engines.trl import grpo, selfplay

        self._send, self._spec = partial(_send, events), spec
        import msgspec

        from nightshift.config.rules import EnvironmentRules
        from nightshift.evaluation import environment

        wanted = msgspec.convert(spec["environments"], list[EnvironmentRules])
        loaded = environment.load(Path(spec["root"]), wanted)
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(spec["num_threads"])
        torch.set_flush_denormal(True)  # a sharp attention makes many, and a step took 1.7 times as long
        self._tokenizer = AutoTokenizer.from_pretrained(spec["model"], revision=spec.get("model_revision"))
        self._policy = self._load_policy(spec["model"])
        self._said: dict[str, Any] = {}  # by a chat up to an answer of the final policy: its Trace
        kind = selfplay.SelfPlay if any(rules.is_game for rules in wanted) else grpo.Trainer
        self._trainer = kind(self._policy, self._tokenizer, loaded, spec, self._send)
        self._trainer.is_stopped = lambda: bool(select.select([0], [], [], 0)[0])  # a command came, or stdin was closed
        self._send({"event": "ready"})

    def obey(self, command: Mapping[str, Any]) -> None:
        """Carry out one command up to its last event. `stop` does no more than end a training by its arrival."""
        match command:
            case {"command": "train", "budget_seconds": budget_seconds}:
                fields = self._trainer.train_for(budget_seconds)
                self._send({"event": "trained", **fields, "peak_memory_gb": _peak_memory_gb(self._spec["device"])})
            case {"command": "load_final_weights"}:
                self._load_final_weights()
            case {"command": "load_step", "step": step}:
                self._load_step(step)
            case {"command": "complete"}:
                self._complete(command)

    def _load_final_weights(self) -> None:
        """Save the policy as a complete Hugging Face folder or not at all, then complete with what the file holds."""
        import torch

        from nightshift.files import apply_umask, sync_folder

        model, step = self._trainer.accelerator.unwrap_model(self._trainer.model), self._trainer.state.global_step
        if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
            raise ValueError(f"the weights after step {step} are not finite")
        final = Path(self._spec["weights_dir"])
        unfinished = final.with_name(f"{final.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()  # no link to another place
        model.save_pretrained(unfinished, max_shard_size="1TB")
        self._tokenizer.save_pretrained(unfinished)
        apply_umask(unfinished)
        for path in (unfinished / "model.safetensors", unfinished):
            sync_folder(path)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        sync_folder(final.parent)
        self._policy, self._said = self._load_policy(str(final)), {}
        with (final / "model.safetensors").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._send({"event": "weights", "step": step, "sha256": digest})

    def _load_step(self, step: int) -> None:
        import torch

        with torch.no_grad():
            for parameter, kept in zip(self._policy.parameters(), self._trainer.earlier[step], strict=True):
                parameter.copy_(kept)
        self._said = {}
        self._send({"event": "completed"})

    def _complete(self, command: Mapping[str, Any]) -> None:
        """One completion a prompt, in order, a batch an event."""
        import torch

        from nightshift.engines.trl.play import Trace
        from nightshift.engines.trl.sampler import sample

        # A chat that goes on goes on in the tokens that were said, as in training.
        traces = [copy.deepcopy(self._said.get(str(chat[:-1]))) or Trace() for chat in command["prompts"]]
        ids = [trace.hear(chat, self._tokenizer) for trace, chat in zip(traces, command["prompts"], strict=True)]
        ends = set(self._trainer.eos_token_ids)
        is_cuda = self._spec["device"] == "cuda"
        self._policy.eval()
        for start in range(0, len(ids), command["batch_size"]):
            batch = ids[start : start + command["batch_size"]]
            with torch.autocast("cuda", torch.bfloat16) if is_cuda else nullcontext():
                samples = sample(self._policy, batch, 1, command["max_completion_tokens"], command["temperature"], ends)
            here = slice(start, start + command["batch_size"])
            texts = [trace.say(one, self._tokenizer) for trace, one in zip(traces[here], samples, strict=True)]
            for chat, text, trace in zip(command["prompts"][here], texts, traces[here], strict=True):
                self._said[str([*chat, {"role": "assistant", "content": text}])] = trace
            completions = [
                {"text": text, "num_tokens": len(one.ids), "truncated": one.truncated}
                for text, one in zip(texts, samples, strict=True)
            ]
            self._send({"event": "completions", "completions": completions})
        self._send({"event": "completed"})

    def _load_policy(self, model: str) -> Any:
        """The model in float32 on the device; a GPU computes in bfloat16 by autocast."""
        from transformers import AutoConfig, AutoModelForCausalLM

        from nightshift.engines.trl.qwen2 import check

        revision = self._spec.get("model_revision")
        check(AutoConfig.from_pretrained(model, revision=revision))
        policy = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype="float32", use_safetensors=True)
        return policy.to(self._spec["device"])


def _send(events: TextIO, event: Mapping[str, Any]) -> None:
    events.write(json.dumps(event, allow_nan=False) + "\n")


def _peak_memory_gb(device: str) -> float:
    """GPU: the most that torch has held; CPU: the largest resident size of this process."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    sys.exit(main())
