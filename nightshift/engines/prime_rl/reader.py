"""The log-probabilities of tokens under two sets of weights, by transformers: a process of its own.

    python -m nightshift.engines.prime_rl.reader BASE FOLDER SERVED ANSWER

Both are Hugging Face folders; FOLDER's weights may be an adapter of BASE.

SERVED: a run's served.json, of which the token ids are read. ANSWER gets JSON, {"start": [[...]], "file": [[...]]}: for
each token but the first its log-probability under BASE and under FOLDER. On the CPU, in float32: bfloat16 would add a
rounding of its own to the server's, and needs four times the CPU where that has no instructions for it (measured with
0.5B parameters: 146 s and 1.8 GB of memory at most, instead of 37 s and 3.7 GB).

Of FOLDER nothing is read but its weights: no hash covers its config. Only safetensors, and no code but transformers'.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(base: Path, folder: Path, served: Path, answer: Path) -> None:
    """Read, compute, write."""
    prompts = json.loads(served.read_bytes())["final"]["tokens"]
    model = _load(base)
    start = _logprobs(model, prompts)
    (_merge if (folder / "adapter_config.json").exists() else _replace)(model, folder)
    answer.write_text(json.dumps({"start": start, "file": _logprobs(model, prompts)}))


def _load(base: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False
    )
    return model.eval()


def _replace(model: Any, folder: Path) -> None:
    """Take all weights from the folder. A tied one may stand there once or twice."""
    from safetensors.torch import load_file

    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    names = {name for name, _ in model.named_parameters()}
    if odd := sorted(names ^ tensors.keys() - (model.state_dict().keys() - names)):
        raise ValueError(f"{folder} holds other weights than the base model: {odd[0]}")
    model.load_state_dict(tensors, strict=False)


def _merge(model: Any, folder: Path) -> None:
    """Add the adapter to the weights: alpha / r * B A, as prime-rl's trainer and vLLM apply it."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    while tensors:
        module = min(tensors).rpartition(".lora_")[0]
        a, b = (tensors.pop(f"{module}.lora_{side}.weight").float() for side in "AB")
        weight = model.get_parameter(f"{module.removeprefix('base_model.model.')}.weight")
        weight.data += config["lora_alpha"] / config["r"] * (b @ a)


def _logprobs(model: Any, prompts: list[list[int]]) -> list[list[float]]:
    import torch
    from torch.nn.functional import cross_entropy

    found = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = torch.tensor(prompt)
            logits = model(tokens[None, :-1], use_cache=False).logits[0]
            found.append([round(-loss, 6) for loss in cross_entropy(logits, tokens[1:], reduction="none").tolist()])
    return found


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
