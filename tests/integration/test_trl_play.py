"""Episodes of several turns, on the real tokenizer: what is learnt from are the policy's own tokens, and only they."""

import copy
import importlib
import random
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from nightshift_tictactoe import data, game
from nightshift_tictactoe.board import START
from nightshift_tictactoe.players import POOL

from nightshift.config.rules import EnvironmentRules
from nightshift.evaluation import environment as environments
from tests.conftest import slow
from tests.integration.test_trl_trainer import make_spec
from tests.rules import ROOT
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return importlib.import_module("nightshift.engines.trl.selfplay")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "models" / "tictactoe-base")


def first_free(module: ModuleType, tokenizer: Any) -> Any:
    """A policy that takes the first empty cell of the board that it was shown last."""

    def say(prompts: list[list[int]]) -> list[Any]:
        boards = [tokenizer.decode(ids).rpartition("Question: ")[2].replace("You are", "").split() for ids in prompts]
        cells = [next(word for word in board if len(word) == 1 and word in START) for board in boards]
        return [module.Sample([*tokenizer(cell)["input_ids"], tokenizer.eos_token_id], False) for cell in cells]

    return say


@pytest.mark.slow
def test_a_trace_is_what_the_seat_saw_and_said(module: ModuleType, tokenizer: Any) -> None:
    episodes = [game.practice(one, "self", number, number) for number, one in enumerate(data.load("train", 40))]
    say = first_free(module, tokenizer)
    other = Mock(side_effect=say)
    traces = module.play(episodes, tokenizer, say, other, 512)
    assert sum(len(call.args[0]) for call in other.call_args_list) > 40
    assert all(episode.ask() is None for episode in episodes)
    for trace, episode in zip(traces, episodes, strict=True):
        chat = episode._chats[episode.seat]
        answers = [message["content"] for message in chat if message["role"] == "assistant"]
        own = [token for token, is_own in zip(trace.completion, trace.is_own, strict=True) if is_own]
        assert tokenizer.decode(own, skip_special_tokens=True) == "".join(answers)
        if answers:
            ids = trace.prompt + trace.completion
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            assert text.startswith(tokenizer.decode(ids))
    win = module.Sample([*tokenizer("d")["input_ids"], tokenizer.eos_token_id], False)
    wins = Mock(return_value=[win])
    lost = game.Match("XXcdOOXhi", "X", None, "self", random.Random(0))
    (trace,) = module.play([lost], tokenizer, wins, wins, 512)
    assert (trace.is_own, lost.score()) == ([0], 0.0), "a seat that was never asked teaches nothing: O had the move"


def test_who_has_heard_more_than_there_is_room_for_says_nothing_more(module: ModuleType, tokenizer: Any) -> None:
    say = first_free(module, tokenizer)
    match = game.Match("Xbcdefghi", "O", None, "self", random.Random(0))
    (whole,) = module.play([copy.deepcopy(match)], tokenizer, say, say, 512)
    room = len(whole.prompt) + 2  # for the first question and no other
    (cut,) = module.play([match], tokenizer, say, say, room)
    assert sum(cut.is_own) == 2
    assert match.details()["ended"] == "forfeit"


def make_trainer(
    tmp_path: Path, tokenizer: Any, max_steps: int = 3, **opponent: Any
) -> tuple[Any, list[dict[str, Any]]]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # two spin while they wait for each other, where all else wants the cores too
    selfplay = importlib.import_module("nightshift.engines.trl.selfplay")
    (environment,) = environments.load(ROOT, [EnvironmentRules("tictactoe", 4, 32, is_game=True)])
    opponent = {"type": "self", "temperature": 0.5, "interval": 2} | opponent
    spec = make_spec(tmp_path, max_steps=max_steps, max_completion_tokens=4, opponent=opponent)
    rows: list[dict[str, Any]] = []
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "tictactoe-base", dtype="float32")
    return selfplay.SelfPlay(model, tokenizer, [environment], spec, lambda event: rows.append(event["row"])), rows


@pytest.mark.parametrize("kind", [slow("self"), "previous", slow("pool")])
def test_a_game_is_trained_in_whole_games_of_one_seat_a_group(kind, tmp_path, tokenizer, monkeypatch):
    selfplay = importlib.import_module("nightshift.engines.trl.selfplay")
    trainer, rows = make_trainer(tmp_path, tokenizer, type=kind)
    play = Mock(side_effect=selfplay.play)
    monkeypatch.setattr(selfplay, "play", play)
    assert trainer.train_for(HANG_SECONDS)["outcome"] == "finished"
    games = [call.args[0] for call in play.call_args_list]
    assert len(games) == 3
    assert 0 < trainer._is_trained.sum() < 0.5 * trainer._is_trained.numel()  # what the trained seat said
    for played, row in zip(games, rows, strict=True):
        groups = [played[start : start + 4] for start in range(0, 32, 4)]
        assert all(len({game.seat for game in group}) == 1 for group in groups)
        assert {game.seat for game in played} == {"X", "O"}
        assert row["reward_mean"] == pytest.approx(sum(game.score() for game in played) / 32)
        assert {game.opponent_name for game in played} <= ({*POOL} if kind == "pool" else {kind})
    if kind == "previous":
        step, before = trainer._previous
        assert step == 2
        pairs = zip(before.parameters(), trainer.model.parameters(), strict=True)
        assert any(not one.equal(other) for one, other in pairs)


def test_a_chat_goes_on_in_the_tokens_that_were_traces_and_an_example_is_part_of_its_prompt(
    module: ModuleType, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = importlib.import_module("nightshift.engines.trl.trainer")
    seen: list[list[int]] = []

    def sample(policy: Any, batch: list[list[int]], *_: Any) -> list[Any]:
        seen.extend(batch)
        return [module.Sample([0, *tokenizer("4")["input_ids"], 1], False) for _ in batch]

    monkeypatch.setattr("nightshift.engines.trl.sampler.sample", sample)
    self = object.__new__(worker.Trainer)
    self._tokenizer, self._traces, self._spec = tokenizer, {}, {"device": "cpu"}
    self._trainer = SimpleNamespace(eos_token_ids=[1], accelerator=SimpleNamespace(autocast=nullcontext))
    self._policy, self._send = SimpleNamespace(eval=lambda: None), lambda event: None

    def complete(*chat: str) -> list[int]:
        roles = ("user", "assistant") * len(chat)
        prompt = [{"role": role, "content": text} for role, text in zip(roles, chat, strict=False)]
        limits = {"max_completion_tokens": 4, "temperature": 0, "batch_size": 8}
        self.complete([prompt, prompt], **limits)
        return seen[-1]

    shots = ("2 + 1?", "3", "2 + 2?")
    whole = "Question: 2 + 1?\nAnswer: 3<|im_end|>\nQuestion: 2 + 2?\nAnswer: "
    assert complete(*shots) == tokenizer(whole)["input_ids"]
    assert tokenizer.decode(complete(*shots, "4", "b")) == f"{whole}<|endoftext|>4<|im_end|>\nQuestion: b\nAnswer: "
