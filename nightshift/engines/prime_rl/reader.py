"""A process that computes the log-probabilities of tokens under two sets of weights, by transformers.

    python -m nightshift.engines.prime_rl.reader BASE FOLDER SERVED ANSWER

BASE and FOLDER are Hugging Face folders; FOLDER may contain an adapter of BASE. SERVED is served.json of a run. ANSWER
gets JSON, {"start": [...], "file": [...]}: the log-probability of each token but the first of each chat under BASE and
under FOLDER, in one list.

The computation is on the CPU in float32: bfloat16 would add a rounding error. Only the weights of FOLDER are read,
because no hash covers its config.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(base: Path, folder: Path, served: Path, answer: Path) -> None:
    """Write the log-probabilities of the tokens in `served` to `answer`."""
    import torch
    from transformers import AutoModelForCausalLM

    prompts = json.loads(served.read_bytes())["tokens"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_safetensors=True, local_files_only=True)
    start = _logprobs(model.eval(), prompts)
    (_merge if (folder / "adapter_config.json").exists() else _replace)(model, folder)
    answer.write_text(json.dumps({"start": start, "file": _logprobs(model, prompts)}))


def _replace(model: Any, folder: Path) -> None:
    """Load all weights of the folder into the model. A tied weight may be stored once or twice."""
    from safetensors.torch import load_file

    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    names = {name for name, _ in model.named_parameters()}
    if different := sorted(names ^ tensors.keys() - (model.state_dict().keys() - names)):
        raise ValueError(f"{folder} has other weights than the base model: {different[0]}")
    model.load_state_dict(tensors, strict=False)


def _merge(model: Any, folder: Path) -> None:
    """Add the adapter to the weights: alpha / r * B A, as in prime-rl's trainer and vLLM."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    while tensors:
        module = min(tensors).rpartition(".lora_")[0]
        a, b = (tensors.pop(f"{module}.lora_{side}.weight").float() for side in "AB")
        weight = model.get_parameter(f"{module.removeprefix('base_model.model.')}.weight")
        weight.data += config["lora_alpha"] / config["r"] * (b @ a)


def _logprobs(model: Any, prompts: list[list[int]]) -> list[float]:
    import torch
    from torch.nn.functional import cross_entropy

    logprobs = list[float]()
    with torch.inference_mode():
        for prompt in prompts:
            tokens = torch.tensor(prompt)
            logits = model(tokens[None, :-1], use_cache=False).logits[0]
            logprobs += [round(-loss, 6) for loss in cross_entropy(logits, tokens[1:], reduction="none").tolist()]
    return logprobs


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
