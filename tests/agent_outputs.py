"""What coding agents print, cut down to what is read: the shapes of Claude Code 2.1, Codex 0.169, Gemini CLI 0.61."""

from __future__ import annotations

import json

_CLAUDE_TOKENS = {
    "input_tokens": 12,
    "cache_creation_input_tokens": 3_500,
    "cache_read_input_tokens": 12_000,
    "output_tokens": 812,
}
_CLAUDE = {"type": "result", "result": "Raised the rate.", "session_id": "0b6a9c0e", "total_cost_usd": 0.4}
_CODEX_TOKENS = {"input_tokens": 26_549, "cached_input_tokens": 22_272, "output_tokens": 1_590}
_CODEX = (
    {"type": "thread.started", "thread_id": "0199a213"},
    {"type": "item.completed", "item": {"type": "reasoning", "text": "**Thinking**"}},
    {"type": "item.completed", "item": {"type": "agent_message", "text": "Done: lr is 5e-6."}},
    {"type": "turn.completed", "usage": _CODEX_TOKENS | {"reasoning_output_tokens": 1_152}},
)
_GEMINI_PRO = {"prompt": 24_939, "candidates": 20, "total": 25_113, "cached": 21_263, "thoughts": 154, "tool": 0}
_GEMINI = {"gemini-pro": {"tokens": _GEMINI_PRO}, "gemini-flash": {"tokens": {"prompt": 1_000, "total": 1_000}}}
CLAUDE = json.dumps(_CLAUDE | {"usage": _CLAUDE_TOKENS}) + "\n"
CODEX = "".join(json.dumps(row) + "\n" for row in _CODEX)
GEMINI = json.dumps({"response": "I halved the batch.", "stats": {"models": _GEMINI}}, indent=2) + "\n"
