"""What coding agents print, cut down: the shapes of Claude Code 2.1, Codex 0.169, Gemini CLI 0.61."""

from __future__ import annotations

import json

_USAGE = {
    "input_tokens": 12,
    "cache_creation_input_tokens": 3_500,
    "cache_read_input_tokens": 12_000,
    "output_tokens": 812,
    "server_tool_use": {"web_search_requests": 0},
    "service_tier": "standard",
}
_RESULT = {
    "type": "result",
    "subtype": "success",
    "is_error": False,
    "duration_ms": 41_234,
    "num_turns": 7,
    "result": "Raised the rate.",
    "session_id": "0b6a9c0e",
    "total_cost_usd": 0.4,
    "usage": _USAGE,
    "modelUsage": {"claude-sonnet": {"inputTokens": 12, "outputTokens": 812, "costUSD": 0.4}},
    "permission_denials": [],
}


def _lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


CLAUDE = _lines(_RESULT)
CODEX = _lines(
    {"type": "thread.started", "thread_id": "0199a213"},
    {"type": "turn.started"},
    {"type": "item.completed", "item": {"id": "item_0", "type": "reasoning", "text": "**Thinking**"}},
    {"type": "item.completed", "item": {"id": "item_3", "type": "agent_message", "text": "Done: lr is 5e-6."}},
    {
        "type": "turn.completed",
        "usage": {
            "input_tokens": 26_549,
            "cached_input_tokens": 22_272,
            "output_tokens": 1_590,
            "reasoning_output_tokens": 1_152,
        },
    },
)
_STATS = {
    "models": {
        "gemini-pro": {
            "api": {"totalRequests": 2, "totalErrors": 0, "totalLatencyMs": 5_053},
            "tokens": {
                "prompt": 24_939,
                "candidates": 20,
                "total": 25_113,
                "cached": 21_263,
                "thoughts": 154,
                "tool": 0,
            },
        },
        "gemini-flash": {"tokens": {"prompt": 1_000, "total": 1_000}},
    },
    "tools": {"totalCalls": 1, "byName": {"replace": {"count": 1}}},
    "files": {"totalLinesAdded": 1, "totalLinesRemoved": 1},
}
GEMINI = json.dumps({"session_id": "5f", "response": "I halved the batch.", "stats": _STATS}, indent=2) + "\n"
