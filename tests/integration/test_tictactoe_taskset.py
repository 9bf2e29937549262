"""Tic-tac-toe with the real verifiers package: whole games of two seats. The stand-in is the served model."""

from pathlib import Path
from typing import Any

import pytest
from nightshift_tictactoe.board import START
from nightshift_tictactoe.game import Match

from tests.integration.test_tasksets import StandIn, episodes
from tests.unit.test_tictactoe_game import read

ID = "nightshift-tictactoe"
NUM_GAMES = 30  # the first two draws are games 29 and 30


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that verifiers makes for rollouts, out of the user's cache."""
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path)


def says(body: dict[str, Any]) -> str:
    """The first empty cell, or nonsense on every fourth board or so."""
    board = read(body["messages"][-1]["content"])
    return "pass" if sum(map(ord, board)) % 4 == 0 else f" {next(cell for cell in board if cell in START)}\n"


def games(stand_in: StandIn, played_by: str, split: str = "train", num_games: int = NUM_GAMES) -> list[Any]:
    """An episode each of the first tasks, by verifiers' own agents and interception server."""
    agent = {"harness": {"id": ID}, "runtime": {"type": "subprocess"}}
    opponent = agent | {"sampling": {"temperature": 1.5}}
    taskset = {"id": ID, "split": split, "size": num_games // 2, "seed": 7}
    config = {"taskset": taskset, "agent": agent, "opponent": opponent, "played_by": played_by}
    return episodes(stand_in, config)


def said(trace: Any) -> list[str]:
    return [node.message.content for node in trace.nodes if node.sampled]


@pytest.mark.slow
def test_games_against_itself_are_scored_as_they_went_forfeits_included() -> None:
    stand_in = StandIn(says)
    played = games(stand_in, "self")
    assert len(played) == NUM_GAMES
    forfeits = []
    for episode in played:
        assert episode.ok, episode.errors
        own, other = episode.traces
        assert (own.agent.name, own.agent.trainable) == ("agent", True)
        assert (other.agent.name, other.agent.trainable) == ("opponent", False)
        match = Match(episode.task.data.board, episode.task.data.seat, None, "self", None)  # type: ignore[arg-type]
        answers = iter(said(own)), iter(said(other))
        while (chat := match.ask()) is not None:
            text = next(answers[match.is_other_asked])
            assert says({"messages": chat}) == text, "its seat was shown another board"
            match.answer(text)
        assert (own.reward, list(own.rewards)) == (match.score(), ["score"])
        assert not other.rewards
        assert own.metrics["forfeit"] == (match.details()["ended"] == "forfeit")
        forfeits.append(own.metrics["forfeit"])
    assert {episode.traces[0].reward for episode in played} == {0.0, 0.5, 1.0}
    assert 0 < sum(forfeits) < NUM_GAMES
    by_seat = [sum(len(said(episode.traces[index])) for episode in played) for index in (0, 1)]
    asked = [request["temperature"] for request in stand_in.requests]
    assert [asked.count(temperature) for temperature in (0.25, 1.5)] == by_seat


def test_against_the_pool_nobody_else_is_asked() -> None:
    stand_in = StandIn(says)
    played = games(stand_in, "pool", "validation", num_games=8)
    assert all(episode.ok and len(episode.traces) == 1 for episode in played)
    assert {request["temperature"] for request in stand_in.requests} == {0.25}
    assert len({episode.traces[0].reward for episode in played}) > 1


@pytest.mark.slow
def test_a_model_that_cannot_answer_is_an_error_and_no_lost_game() -> None:
    for episode in games(StandIn(says, status=500), "self", num_games=2):
        assert any(trace.errors for trace in episode.traces)
        assert not episode.ok
