"""Runs an agent's command once in the sandbox of a night: `in_sandbox.py JSON`, and prints how it went as JSON.

JSON: `agent` (--agent), `sandbox`, `root` (a checkout), `temporary`, `environ` (the user's), `libraries` (to import).
Also `source` (train.toml) and `prompt`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    asked = json.loads(sys.argv[1])
    sys.path[:0] = asked["libraries"]
    from nightshift.agents.agent import complete, open_agent
    from nightshift.agents.clone import Clone
    from nightshift.campaign.git import Repo
    from nightshift.errors import UsageError

    root, temporary = Path(asked["root"]), Path(asked["temporary"])
    clone, log = Clone(Repo(root), temporary), temporary / "agent.log"
    try:
        agent = open_agent(asked["agent"], asked["sandbox"], root, asked["environ"], 600.0, clone, (), ())
    except UsageError as error:
        print(json.dumps({"refused": str(error)}))
        return
    ending = complete(agent.run(asked.get("source", "lr = 1\n").encode(), asked.get("prompt", "the brief"), log, {}))
    answer = clone.path / "hypothesis.txt"
    told = {"log": log.read_text(), "cause": ending.cause, "notes": ending.notes}
    told |= {"sandbox": agent.sandbox.name, "warning": agent.sandbox.warning}
    told |= {"config": (clone.path / "train.toml").read_text(), "answer": answer.is_file() and answer.read_text()}
    clone.clear()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
