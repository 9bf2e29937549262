"""`uv run nightshift night`: create or resume a night, choose branch and proposer, return the exit code."""

import os
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from nightshift.agents.agent import Agent, AgentProposer, open_agent
from nightshift.agents.availability import Meaning
from nightshift.agents.base import Proposer
from nightshift.agents.clone import Clone
from nightshift.agents.direction import read_direction
from nightshift.agents.presets import PRESETS, SEARCHES
from nightshift.agents.sandbox import end_earlier
from nightshift.agents.team import PREFIX, TeamProposer, members
from nightshift.campaign.campaign import resume, uncommitted
from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.config.train_toml import read_source
from nightshift.engines.machine import read_machine
from nightshift.errors import ExitCode, UsageError
from nightshift.executors.process import end_leftovers
from nightshift.executors.slurm import end_jobs, jobs_left
from nightshift.experiment.checkout import plan
from nightshift.experiment.experiment import Controller, Reporter, open_controller
from nightshift.night.loop import Night
from nightshift.night.observers import Notifier, next_stop, tag_night
from nightshift.night.proposals import undecided
from nightshift.night.state import STOP_NAME, NightRequest, NightState, load, save
from nightshift.report.export.wandb_runs import live_runs


def night(
    root: Path,
    request: NightRequest,
    reporter: Reporter,
    tell: Callable[[str], None],
    notify: str | None = None,
    branch: str | None = None,
    wandb: str | None = None,
    has_tag: bool = True,
) -> int:
    """Run a night to its end. `tell` gets the summaries, `reporter` the news; the other arguments are flags.

    Returns the exit code. 0: a stop rule or the user ended the night; 1: the night could not continue, or a kept change
    could not be committed. NightshiftError: the night could not start.
    """
    ledger, note, project = Ledger(root), reporter.note, wandb or read_machine(root).wandb.project
    notifier = Notifier(notify, note, ledger.runs_dir / "notify.log")
    logging = live_runs(root, project, note) if project else nullcontext(lambda: None)
    with notifier.running(), ledger.lock(), logging as look:
        old = load(ledger)
        end_leftovers(root, note)  # first, because processes of an earlier night may still write
        end_earlier(Clone(Repo(root)), note)
        controller, proposer = open_night(root, request, reporter, branch)
        controller.bench.engine.prepare_at_start(note)
        ask_before(proposer, controller)
        controller.begin(branch)
        state = replace(begin(request, controller), sandbox=proposer.sandbox)
        if old is None or state.started != old.started:
            end_jobs(ledger, note)
        else:
            for folder, job in jobs_left(ledger, state.first).items():
                controller.bench.executor.take_over(folder, job)
        rules = controller.bench.rules
        note(f"task {'+'.join(rules.environment_names)}, model {rules.model}, {rules.budget_text} per run")
        note(f"the night stops {next_stop(state, state.closed(ledger.records()), controller.now())}")
        note("per experiment: change (+: a new key), measured score, effect ± half of its 95 % interval, verdict: why")
        night = Night(state, controller, proposer, tell, filler=search_of("tpe", request))
        night.observers += [notifier, lambda *_: look(), *([tag_night] if has_tag else [])]
        stop = night.run()
        missing = uncommitted(ledger.records(), state.branch)
    return ExitCode.MEASURED if stop.is_planned and missing is None else ExitCode.CRASH


def ask_before(proposer: Proposer, controller: Controller) -> None:
    """Ask each preset agent one question. Your own command may treat any prompt as a brief. Raises UsageError if an
    agent needs the user, who is still there."""
    folder, note = controller.ledger.runs_dir / "agent", controller.reporter.note
    agents = proposer.agents if isinstance(proposer, AgentProposer) else ()
    for agent in (agent for agent in agents if agent.name in PRESETS):
        folder.mkdir(parents=True, exist_ok=True)
        answer = agent.question(read_source(controller.bench.root / CONFIG_NAME), folder)
        if answer.meaning is Meaning.OK:
            note(f"{agent.name} answers (sandbox: {agent.sandbox.name})")
        elif answer.waits:  # the night asks again
            note(f"{agent.name} is unavailable now: {answer.meaning}: {answer.text}")
        else:
            fix = "Log in with the program itself, add credit, or choose another --agent-model; then start the night."
            raise UsageError(f"{agent.name}: {answer.meaning}: {answer.text}", fix)


def stop_night(root: Path) -> str:
    """End a night without a controller, and its jobs in SLURM. Returns one line per action."""
    ledger, repo, notes = Ledger(root), Repo(root), list[str]()
    with ledger.lock():
        end_leftovers(root, notes.append)
        end_earlier(Clone(repo), notes.append)
        end_jobs(ledger, notes.append, of_certificates=True)
        resume(ledger, repo, notes.append)
        state = load(ledger)
        if state is not None and state.cause is None:
            save(ledger, replace(state, cause="stopped by night --stop"))
            notes.append(f"the night of {state.started} is over")
    return "\n".join(notes or ["no night to stop"])


def open_night(
    root: Path, request: NightRequest, reporter: Reporter, branch: str | None
) -> tuple[Controller, Proposer]:
    """Return a controller whose engine is ready, and the proposer. Call with the ledger's lock. UsageError for flags
    that cannot be used together, a direction that cannot be read, or an interrupted night on another branch."""
    if (root / STOP_NAME).exists():
        raise UsageError(f"the file {STOP_NAME} is still in the checkout", "Delete it, then start the night.")
    if request.agent in SEARCHES and (request.direction or request.agent_model or request.agent_effort):
        cause = f"--agent {request.agent} cannot have --direction, --agent-model or --agent-effort"
        raise UsageError(cause, "Use --only KEYS, or name a coding agent.")
    read_direction(root, request.direction, request.only)
    ledger, now = Ledger(root), datetime.now(UTC)
    old, start = load(ledger), plan(Repo(root), ledger.records(), now, name=branch)
    is_elsewhere = old is not None and old.branch != start.head.branch and old.branch in Repo(root).branches()
    if branch is None and old and is_elsewhere and _is_same(old, request, now):
        fix = f"To resume, git switch {shlex.quote(old.branch)} and run the command again; or --branch NEW."
        raise UsageError(f"the interrupted night is on {old.branch}, and {start.before} is checked out", fix)
    controller = open_controller(root, request.request, reporter, branch)
    controller.bench.executor.require_ready()
    controller.bench.require_ready(controller.bench.executor.free_slots)
    return controller, proposer_of(request, controller)


def create_branch(root: Path, request: NightRequest, reporter: Reporter, branch: str | None) -> None:
    """Check out the night's branch before another process runs the night (--detach)."""
    with Ledger(root).lock():
        open_night(root, request, reporter, branch)[0].begin(branch)


def _is_same(old: NightState, request: NightRequest, now: datetime) -> bool:
    """Return True if `request` resumes the interrupted night. The direction may differ."""
    is_same = replace(old.request, direction=request.direction, only=request.only) == request
    return old.cause is None and is_same and (old.deadline is None or now < old.deadline)


def begin(request: NightRequest, controller: Controller) -> NightState:
    """Return the state of the interrupted night, or of a new night on the current branch."""
    ledger, now, note = controller.ledger, controller.now(), controller.reporter.note
    old, number, started = load(ledger), ledger.next_number(), now.isoformat(timespec="seconds")
    campaign = controller.repo.head().branch, controller.bench.rules_hash
    state = NightState(request, campaign[1], branch=campaign[0], started=started, first=number, command=request.command)
    if old is None or (old.branch, old.rules_hash) != campaign:
        return state
    if _is_same(old, request, now):
        note(f"resuming the night of {old.started}")
        waits = tuple(wait for wait in old.waits if wait.ended)  # nobody knows when the others ended
        return replace(old, request=request, command=request.command, pid=os.getpid(), waits=waits)
    cause = old.cause or "its flags differ, or its hours have passed"
    note(f"starting a new night; the night of {old.started} is over: {cause}")
    return replace(state, pending=undecided(old, old.closed(ledger.records())))  # paid for, and never run


def search_of(name: str, request: NightRequest) -> Proposer:
    """Return the proposer tpe or random."""
    from nightshift.agents.search import SearchProposer

    return SearchProposer(name, request.seed)


def proposer_of(request: NightRequest, controller: Controller) -> Proposer:
    """Return the proposer of --agent. Raises UsageError for a missing program."""
    if request.agent in SEARCHES:
        return search_of(request.agent, request)
    agents, executor, is_team = list[Agent](), controller.bench.executor, request.agent.startswith(PREFIX)
    for name in members(request.agent) if is_team else [request.agent]:
        agent = open_agent(
            name,
            request.sandbox,
            controller.bench.root,
            dict(os.environ),
            request.agent_timeout_seconds,
            Clone(controller.repo),
            request.agent_env,
            request.agent_sees,
            model=request.agent_model,
            effort=request.agent_effort,
        )
        agents.append(replace(agent, clock=controller.clock))
        executor.environ = {**executor.environ, **agent.sandbox.engine_variables()}
        for line in filter(None, (agent.sandbox.warning, agent.sandbox.summary(agent.name))):
            controller.reporter.note(line)
    return TeamProposer(tuple(agents)) if is_team else AgentProposer(tuple(agents))
