"""The child process of the trl engine: `python -m nightshift.engines.trl.trainer SPEC.json`.

It reads commands as JSON lines from stdin and writes events as JSON lines to stdout. The output of libraries goes to
stderr, the log of the run. A failure is one `error` event with its cause, a traceback on stderr, and exit code 1.
Imports are inside functions, to make the start faster.
"""

import copy
import gc
import hashlib
import json
import os
import select
import shutil
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any


def main() -> int:
    """Carry out commands until stdin is closed. Return the exit code."""
    # Libraries may print to stdout while they are imported, so stdout becomes the log first.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(event: Mapping[str, Any]) -> None:
        events.write(json.dumps(event, allow_nan=False) + "\n")

    gc.disable()  # garbage collection during the imports took a quarter of the start
    try:
        trainer = Trainer(json.loads(Path(sys.argv[1]).read_text()), send)
        gc.freeze()
        gc.enable()
        for line in sys.stdin.buffer:
            command = json.loads(line)
            if (name := command.pop("command")) != "stop":  # the training itself notices "stop"
                getattr(trainer, name)(**command)
    except Exception as error:
        traceback.print_exc()
        cause = " ".join(str(error).split()) or type(error).__name__
        is_environment = type(error).__name__ == "EngineError"  # by name: nightshift.errors is not imported here
        send({"event": "error", "cause": cause, "is_infrastructure": is_environment})
        return 1
    return 0


class Trainer:
    """A policy with its trainer. Each public method carries out the command of its name, and sends its events."""

    def __init__(self, spec: Mapping[str, Any], send: Any) -> None:
        import msgspec
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        from nightshift.config.rules import EnvironmentRules
        from nightshift.engines.trl import grpo, selfplay
        from nightshift.evaluation import environment

        self._send, self._spec = send, spec
        logging.disable_progress_bar()
        torch.set_num_threads(spec["num_threads"])
        torch.set_flush_denormal(True)  # sharp attention makes many denormals, and a step took 1.7 times as long
        self._tokenizer = AutoTokenizer.from_pretrained(spec["model"])
        # Weights are float32; a GPU computes in bfloat16 by autocast.
        self._load = partial(AutoModelForCausalLM.from_pretrained, dtype="float32", use_safetensors=True)
        self._policy = self._load(spec["model"]).to(spec["device"])
        self._traces: dict[str, Any] = {}  # of the final policy, by the chat up to its last answer
        rules = msgspec.convert(spec["environments"], list[EnvironmentRules])
        kind = selfplay.SelfPlay if any(environment_rules.is_game for environment_rules in rules) else grpo.Trainer
        environments = environment.load(Path(spec["root"]), rules)
        self._trainer = kind(self._policy, self._tokenizer, environments, spec, send)
        self._trainer.is_stopped = lambda: bool(select.select([0], [], [], 0)[0])  # a command, or stdin was closed
        send({"event": "ready"})

    def train(self, budget_seconds: float) -> None:
        self._send({"event": "trained", "training": self._trainer.train_for(budget_seconds)})

    def load_final_weights(self) -> None:
        """Save the policy as a Hugging Face folder, and load the saved weights for completions."""
        from nightshift.files import apply_umask

        model, step = self._trainer.accelerator.unwrap_model(self._trainer.model), self._trainer.state.global_step
        if not all(parameter.isfinite().all() for parameter in model.parameters()):
            raise ValueError(f"the weights after step {step} are not finite")
        final = Path(self._spec["weights_dir"])
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        model.save_pretrained(final, max_shard_size="1TB")
        self._tokenizer.save_pretrained(final)
        apply_umask(final)
        self._policy, self._traces = self._load(final).to(self._spec["device"]), {}
        with (final / "model.safetensors").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._send({"event": "weights", "weights": {"step": step, "sha256": digest}})

    def complete(self, prompts: list[Any], max_completion_tokens: int, temperature: float, batch_size: int) -> None:
        """Send one completion per prompt, in order, one event per batch."""
        from nightshift.engines.trl.sampler import sample
        from nightshift.engines.trl.selfplay import Trace

        # The next turn of a chat continues the sampled tokens, as in training.
        traces = [copy.deepcopy(self._traces.get(str(chat[:-1]))) or Trace() for chat in prompts]
        ids = [trace.hear(chat, self._tokenizer) for trace, chat in zip(traces, prompts, strict=True)]
        ends = set(self._trainer.eos_token_ids)
        self._policy.eval()
        for start in range(0, len(ids), batch_size):
            batch = slice(start, start + batch_size)
            with self._trainer.accelerator.autocast():
                samples = sample(self._policy, ids[batch], 1, max_completion_tokens, temperature, ends)
            completions = []
            for chat, trace, answer in zip(prompts[batch], traces[batch], samples, strict=True):
                text = trace.say(answer, self._tokenizer)
                self._traces[str([*chat, {"role": "assistant", "content": text}])] = trace
                completions.append({"text": text, "num_tokens": len(answer.ids), "truncated": answer.truncated})
            self._send({"event": "completions", "completions": completions})
        self._send({"event": "completed"})


if __name__ == "__main__":
    sys.exit(main())
