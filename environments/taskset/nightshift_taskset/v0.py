"""A verifiers v0 environment (`load_environment`) of one question and one answer as a v1 taskset.

The prompts become tasks. The environment's own rollout and rubric score an answer: the answer replaces the model.
"""

import contextvars
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import parse_message

from nightshift_taskset.tasks import refuse

_FIX = "Choose a v0 environment of one question and one answer, or a v1 environment"
_answer: contextvars.ContextVar[str] = contextvars.ContextVar("answer")


def adapted(name: str, spec: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return name and spec of a v1 package for an imported package; for a v0 environment, of a new module."""
    module = sys.modules[name]
    exported = [getattr(module, member, None) for member in getattr(module, "__all__", ())]
    is_v1 = any(isinstance(member, type) and issubclass(member, vf.Taskset) for member in exported)
    if is_v1 or not hasattr(module, "load_environment"):
        return name, spec
    wrapper: Any = ModuleType(f"nightshift_v0_{name.lower()}")
    wrapper.V0Taskset, wrapper.__all__ = _taskset(name, module.load_environment(**spec["args"])), ["V0Taskset"]
    sys.modules[wrapper.__name__] = wrapper
    return wrapper.__name__, {**spec, "args": {}}


def _taskset(name: str, env: Any) -> type[vf.Taskset[Any, Any]]:
    """Return the taskset class of a v0 environment. Refused if the adapter does not support the environment."""
    import verifiers.legacy as v0
    from verifiers.legacy.clients import resolve_client
    from verifiers.legacy.types import ClientConfig, Response, ResponseMessage

    rubrics = [getattr(env, "rubric", None)]  # what load_environment returned need not be an environment
    for rubric in rubrics:  # which grows
        rubrics += getattr(rubric, "rubrics", ())
    judges = [str(rubric.judge_model) for rubric in rubrics if isinstance(rubric, v0.JudgeRubric)]
    has_tools, kind = isinstance(env, v0.ToolEnv) or bool(getattr(env, "tool_defs", None)), type(env).__name__
    refuse(
        f"{name} is a v0 environment",
        (has_tools, f"with tools ({kind})", _FIX),
        (not isinstance(env, v0.SingleTurnEnv), f"with several turns or several environments ({kind})", _FIX),
        (judges, f"that asks a judge: {', '.join(judges)}", _FIX),
        (getattr(env, "requires_group_rollouts", False), "whose rewards compare several answers", _FIX),
    )

    async def get_model_response(state: Any, prompt: Any, *others: Any, **named: Any) -> Response:
        message = ResponseMessage(role="assistant", content=_answer.get(), finish_reason="stop", is_truncated=False)
        return Response(id="answer", created=0, model="policy", message=message)

    env.get_model_response = get_model_response
    client = resolve_client(ClientConfig(api_key_var="NO_KEY", api_base_url="http://127.0.0.1:9/v1"))  # never asked

    class V0Data(vf.TaskData):
        answer: str = ""
        row: dict[str, Any]

    class V0Task(vf.Task[V0Data]):
        @vf.reward
        async def rubric(self, trace: vf.Trace) -> float:
            """Score the last reply with v0's own rollout."""
            replies = trace.assistant_messages
            _answer.set((replies[-1].content or "") if replies else "")
            row = {**self.data.row, "example_id": self.data.idx or 0}
            state = await env._run_rollout_state(row, client, "policy", {})
            if state["error"] is not None:
                raise RuntimeError(f"v0 rollout: {state['error']!r}")
            return float(state["reward"])

    class V0Taskset(vf.Taskset[V0Task, vf.TasksetConfig]):
        """The rows of the training set, or of the evaluation set if there is no training set."""

        def load(self) -> Iterator[V0Task]:
            rows = env.get_dataset() if env.dataset_source or env.dataset is not None else env.get_eval_dataset()
            for index, row in enumerate(rows):
                row = {key: value for key, value in row.items() if value is not None and key != "example_id"}
                text, answer = row["prompt"], row.get("answer", "")
                prompt = text if isinstance(text, str) else [parse_message(message) for message in text]
                data = V0Data(idx=index, prompt=prompt, row=row, answer=answer if isinstance(answer, str) else "")
                yield V0Task(data, self.config.task)

    return V0Taskset
