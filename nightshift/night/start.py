"""`uv run nightshift night`: create or resume a night, choose branch and proposer, return the exit code."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from nightshift.agents.agent import Agent, AgentProposer, open_agent
from nightshift.agents.availability import Availability, Meaning
from nightshift.agents.base import Proposer
from nightshift.agents.clone import Clone
from nightshift.agents.direction import read_direction
from nightshift.agents.presets import PRESETS, SEARCHES
from nightshift.agents.sandbox import end_earlier
from nightshift.agents.team import PREFIX, TeamProposer, members
from nightshift.campaign.campaign import resume, uncommitted
from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import NIGHT_NAME
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
from nightshift.text import clean

_INHIBIT_SECONDS = 0.5  # systemd-inhibit fails at once, or not at all
_REMEDIES = {  # by the user
    Meaning.LOGIN: "Log in with the program itself, then start the night.",
    Meaning.BILLING: "Add credit, change the plan, or name another --agent.",
    Meaning.MODEL: "Choose a model of this account with --agent-model or in the program's settings.",
}


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

    Returns:
        The exit code. 0: a stop rule or the user ended the night; 1: the night could not continue, or a kept change
        could not be committed.

    Raises:
        NightshiftError: the night could not start.
    """
    ledger, notifier = Ledger(root), Notifier(notify, reporter.note)
    project = wandb or read_machine(root).wandb.project
    logging = live_runs(root, project, reporter.note) if project else nullcontext(lambda: None)
    with notifier.running(), ledger.lock(), logging as look:
        old = load(ledger)
        end_leftovers(root, reporter.note)  # first, because processes of an earlier night may still write
        end_earlier(Clone(Repo(root)), reporter.note)
        controller, proposer = open_night(root, request, reporter, branch)
        controller.bench.engine.prepare_at_start(reporter.note)
        unavailable = ask_before(proposer, controller)
        controller.begin(branch)
        state = replace(begin(request, controller), sandbox=proposer.sandbox)
        executor = controller.bench.executor
        if old is None or state.started != old.started:
            end_jobs(ledger, reporter.note)
        else:
            jobs = jobs_left(ledger, state.first).items()
            if numbers := ", ".join(sorted(folder.name for folder, job in jobs if executor.take_over(folder, job))):
                reporter.note(f"resumed the jobs of this night: {numbers}")
        reporter.note(f"the night stops {next_stop(state, state.closed(ledger.records()), controller.now())}")
        reporter.note("per experiment: change, measured score, effect ± half of its 95 % interval, verdict: why")
        filler = search_of("tpe", request) if request.fill is not False and request.agent not in SEARCHES else None
        with inhibit_sleep(reporter.note):
            night = Night(state, controller, proposer, tell, notifier, filler, unavailable)
            night.desk.observers += [lambda *_: look(), *([tag_night] if has_tag else [])]
            stop = night.run()
        missing = uncommitted(controller.ledger.records(), state.branch)
    return ExitCode.MEASURED if stop.is_planned and missing is None else ExitCode.CRASH


def ask_before(proposer: Proposer, controller: Controller) -> Availability | None:
    """Ask each preset agent one question. Returns why an agent is unavailable for now, None if all answer.

    Your own command is not asked, because it may treat any prompt as a brief.

    Raises:
        UsageError: an agent needs the user, who is still there.
    """
    folder, unavailable = controller.ledger.runs_dir / "agent", None
    agents = proposer.agents if isinstance(proposer, AgentProposer) else ()
    for agent in {agent.command: agent for agent in agents if agent.name in PRESETS}.values():
        folder.mkdir(parents=True, exist_ok=True)
        answer, name = agent.question(read_source(controller.bench.root / CONFIG_NAME), folder), agent.name
        if answer.waits:
            unavailable = answer if agent.title == proposer.name else replace(answer, text=f"{name}: {answer.text}")
        elif answer.meaning is not Meaning.OK:
            fix = _REMEDIES.get(answer.meaning, "To ask again: uv run nightshift doctor --agent NAME.")
            raise UsageError(f"{name}: {answer.meaning}: {answer.text}", fix)
        else:
            controller.reporter.note(f"{name} answers (sandbox: {agent.sandbox.name})")
    return unavailable


@contextmanager
def inhibit_sleep(note: Callable[[str], None]) -> Iterator[None]:
    """Keep this machine awake. A machine with neither caffeinate nor systemd does not sleep."""
    words = ["caffeinate", "-i", "cat"]
    if Path("/run/systemd/system").is_dir():
        words = ["systemd-inhibit", "--what=sleep:idle", "--who=nightshift", "--why=experiments", "cat"]
    if shutil.which(words[0]) is None:
        yield
        return
    # `cat` ends with this process in any case, because its stdin is closed then.
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(words, stdin=pipe, stdout=null, stderr=pipe, process_group=0) as child:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_INHIBIT_SECONDS)
            assert child.stderr is not None
            cause = child.stderr.read(1000).decode(errors="replace").strip() or f"exit code {child.returncode}"
            note(f"this machine may fall asleep: {words[0]}: {clean(cause)}")
        yield


def stop_night(root: Path) -> str:
    """End a night without a controller, and its jobs in SLURM. Returns one line per action."""
    ledger, notes = Ledger(root), list[str]()
    with ledger.lock():
        end_leftovers(root, notes.append)
        end_earlier(Clone(Repo(root)), notes.append)
        end_jobs(ledger, notes.append, of_certificates=True)
        resume(ledger, Repo(root), notes.append)
        state = load(ledger)
        if state is not None and state.cause is None:
            save(ledger, replace(state, cause="stopped by night --stop"))
            notes.append(f"the night of {state.started} is over")
    return "\n".join(notes or ["no night to stop"])


def open_night(
    root: Path, request: NightRequest, reporter: Reporter, branch: str | None
) -> tuple[Controller, Proposer]:
    """Return a controller whose engine is ready, and the proposer. Call with the ledger's lock.

    Raises:
        UsageError: the direction cannot be read, or the interrupted night is on another branch.
    """
    if (root / STOP_NAME).exists():
        raise UsageError(f"the file {STOP_NAME} is still in the checkout", "Delete it, then start the night.")
    repo, ledger, now = Repo(root), Ledger(root), datetime.now(UTC)
    old, start = load(ledger), plan(repo, ledger.records(), now, name=branch)
    is_away = old is not None and start.head.branch != old.branch and branch is None and _is_same(old, request, now)
    if old is not None and is_away and old.branch in repo.branches():
        fix = f"To resume, git switch {shlex.quote(old.branch)} and run the command again; or --branch NEW."
        raise UsageError(f"the interrupted night is on {old.branch}, and {start.before} is checked out", fix)
    controller = open_controller(root, request.request, reporter, branch)
    controller.bench.executor.require_ready()
    controller.bench.require_ready(controller.bench.executor.free_slots)
    proposer = proposer_of(request, controller)
    if request.agent in SEARCHES and request.direction is not None:
        raise UsageError(f"--direction: {request.agent} cannot read a text", "Use --only KEYS, or name an agent.")
    read_direction(root, request.direction, request.only)
    return controller, proposer


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
    old, number, rules_hash = load(ledger), ledger.next_number(), controller.bench.rules_hash
    branch, started = controller.repo.head().branch, now.isoformat(timespec="seconds")
    state = NightState(request, rules_hash, branch=branch, started=started, first=number)
    if old is None:
        return state
    is_same_campaign = (old.branch, old.rules_hash) == (branch, rules_hash)
    if is_same_campaign and _is_same(old, request, now):
        note(f"resuming the night of {old.started}")
        last = datetime.fromtimestamp((ledger.runs_dir / NIGHT_NAME).stat().st_mtime, UTC)
        ended = min(last, now).isoformat(timespec="seconds")  # when the night is known to have waited
        waits = tuple(replace(wait, ended=wait.ended or ended) for wait in old.waits)
        return replace(old, request=request, pid=os.getpid(), waits=waits)
    cause = old.cause or "its flags, rules or branch differ, or its hours have passed"
    note(f"starting a new night; the night of {old.started} is over: {cause}")
    if not is_same_campaign:
        return state
    answers = undecided(old, old.closed(ledger.records()))  # proposals that were paid for and never ran
    return replace(state, pending=tuple(replace(answer, number=number) for answer in answers))


def search_of(name: str, request: NightRequest) -> Proposer:
    from nightshift.agents.search import SearchProposer

    return SearchProposer(name, request.seed)


def proposer_of(request: NightRequest, controller: Controller) -> Proposer:
    """Return the proposer of --agent. Raises UsageError for a missing program."""
    if request.agent in SEARCHES:
        if request.agent_model or request.agent_effort:
            raise UsageError(f"--agent {request.agent} has no model and no effort", "Omit both options.")
        return search_of(request.agent, request)
    clone, environ, seconds = Clone(controller.repo), dict(os.environ), request.agent_timeout_seconds
    is_team = request.agent.startswith(PREFIX)
    more = (request.agent_env, request.agent_sees, request.agent_model, request.agent_effort)
    agents, executor, notes = list[Agent](), controller.bench.executor, dict[str | None, None]()
    for name in members(request.agent) if is_team else [request.agent]:
        agent = open_agent(name, request.sandbox, controller.bench.root, environ, seconds, clone, *more)
        agents.append(replace(agent, clock=controller.clock))
        notes |= dict.fromkeys([agent.sandbox.warning, agent.sandbox.summary(agent.name)])
        executor.environ = {**executor.environ, **agent.sandbox.engine_variables()}
    for note in filter(None, notes):
        controller.reporter.note(note)
    return TeamProposer(tuple(agents)) if is_team else AgentProposer(tuple(agents))
