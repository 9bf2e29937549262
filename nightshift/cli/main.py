"""`uv run nightshift`: what one asks of a campaign beside running an experiment."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Comparison, Request
from nightshift.cli import run
from nightshift.cli.output import print_error, print_found, print_text
from nightshift.cli.progress import TerminalReporter, reporting
from nightshift.cli.shell import (
    AGENT_ENV,
    AGENT_SEES,
    AS_JSON,
    BRANCH,
    GPUS,
    SANDBOX,
    SLURM,
    Finite,
    Group,
    num_slots,
    use_prime_rl,
)
from nightshift.cli.status import Status, follow_night, is_under_way, wait_for_verdict
from nightshift.config.import_config import IMPORTED_NAME, carried_rules, import_config
from nightshift.config.rules import RULES_NAME
from nightshift.config.rules_toml import rules_here
from nightshift.engines.base import ENGINES, PrepareFlags
from nightshift.errors import ExitCode, UsageError
from nightshift.executors.gpus import num_gpus
from nightshift.files import read_file, remove_tree, write_atomically
from nightshift.text import clean

if TYPE_CHECKING:
    from nightshift.report.data import Story


_ENDINGS = {"csv": ".csv", "wandb": "-wandb", "model": "-model", "rl.toml": "-rl.toml"}
_TEXTS = ("csv", "rl.toml")  # that go to stdout
_OF_ONE = {"model": "a model and its card", "rl.toml": "a config of prime-rl"}


@click.group(cls=Group, help=__doc__)
def commands() -> None:
    """The group of all subcommands."""


@commands.command()
@AS_JSON
@reporting("reading the records")
def status(as_json: bool) -> None:
    """What is running, for how long, and what the ledger holds."""
    from nightshift.experiment.checkout import next_start

    root = run.process_root()
    ledger = Ledger(root)
    found = Status.of(ledger, datetime.now(UTC), next_start(ledger, Repo(root)) or None)
    print_found(found, found.lines(), as_json)


@commands.command()
@click.option("--environment", "environments", multiple=True, help="Compare there; several joined by +. Repeatable.")
@click.option("--budget-seconds", type=float, help="Train for so long: does the winner of a short run win a long one?")
@click.option("--baseline", metavar="REV", help="A commit whose train.toml is the baseline. Default: the campaign's.")
@click.option("--incumbent", metavar="REV", help="A commit whose train.toml is the incumbent. Default: the campaign's.")
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1, 100),
    help="Fresh runs of each of the two. Default: 3, which show a gain of 3.5 pp in 51 % of simulated comparisons and "
    "a gain of 5 pp in 81 %; 5 seeds show them in 74 % and 97 %.",
)
@click.option("--resume", type=int, metavar="NNNN", help="Make the missing runs of comparison NNNN.")
@click.option("--new", "is_new", is_flag=True, help="Begin another comparison beside an unfinished one.")
@click.option("--dry-run", is_flag=True, help="Show the plan; read nothing of the test split.")
@GPUS
@SLURM
@AS_JSON
def certify(
    baseline: str | None,
    incumbent: str | None,
    dry_run: bool,
    gpus: str | None,
    slurm: Path | None,
    as_json: bool,
    **question: Any,
) -> None:
    """Train baseline and incumbent afresh, in all slots of the campaign, and compare them.

    Without --environment and --budget-seconds it uses the test split, and each use counts. With them it uses the
    validation split there. An unfinished comparison has a number: --resume NNNN finishes it.
    """
    from nightshift.executors.process import end_leftovers
    from nightshift.experiment import certify as certificates
    from nightshift.experiment.experiment import open_controller

    sides = {"baseline": baseline, "incumbent": incumbent}
    revisions = {side: revision for side, revision in sides.items() if revision is not None}
    with reporting() as reporter:
        controller = open_controller(run.process_root(), Request(gpus=gpus, slurm=slurm), reporter)
        find = partial(certificates.tasks, controller, revisions=revisions, **question)
        # A wrong question is refused before anything is ended.
        plan = tuple(line for task in find() for line in task.describe())
        comparisons = tuple[Comparison, ...]()
        if not dry_run:
            with controller.ledger.lock():
                end_leftovers(controller.bench.root, reporter.note)
                comparisons = tuple(certificates.certify(find()))
    certified = certificates.Certified(plan=plan, comparisons=comparisons)
    print_found(certified, plan if dry_run else [str(certified)], as_json)


@commands.command()
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=math.inf,
    help="Give up after so many seconds, with exit code 124.",
)
@click.option("--night", is_flag=True, help="Follow the night: print what it says until it is over, then its summary.")
def wait(timeout: float, night: bool) -> None:
    """Wait for the experiment in flight and print its summary; exits as that experiment did."""
    sys.exit((follow_night if night else wait_for_verdict)(run.process_root(), timeout))


@commands.command()
@AS_JSON
@reporting("reading the records")
def history(as_json: bool) -> None:
    """Show every run of the last campaign with its measured score, the scores by key and value, and untried keys."""
    from nightshift.agents.history import of_last_campaign

    tables = of_last_campaign(Ledger(run.process_root()))
    print_found(tables, [str(tables)], as_json)


@commands.command()
@click.option(
    "--agent", help="claude, codex, gemini, opencode, pi, qwen, team:A,B, search, tpe, random, or your own command."
)
@click.option(
    "--direction",
    metavar="TEXT|FILE",
    help="What the agent is to try, at most 1,500 characters. Default: the section Direction of program.md.",
)
@click.option(
    "--only",
    metavar="KEYS",
    help="Change only these keys and tables, such as trainer.scheduler,trainer.optim.lr. Others are rejected.",
)
@click.option("--hours", type=Finite(0, 10_000, min_open=True), help="No run is started that would end later.")
@click.option(
    "--experiments", type=click.IntRange(min=1), help="Stop after so many, the baseline and the last runs included."
)
@click.option("--plateau", type=click.IntRange(min=1), help="Stop when nothing was kept in so many, and one more.")
@click.option(
    "--riders",
    type=click.IntRange(0, 1),
    default=1,
    show_default=True,
    help="Discarded changes that each run measures again. 0: each run holds the incumbent and the new change only.",
)
@click.option(
    "--certify",
    type=click.IntRange(1, 100),
    metavar="N",
    help="End with a certificate of N fresh runs of baseline and incumbent; their time is kept free.",
)
@click.option(
    "--fill/--no-fill",
    default=None,
    help="While the agent cannot be asked (usage limit, outage, login), run proposals of tpe. Default: --fill, but "
    "--no-fill in a night with a direction without --only, because tpe reads no text.",
)
@click.option(
    "--until",
    type=Finite(0, 1, min_open=True),
    metavar="SCORE",
    help="Stop when the lower bound of the incumbent's score (95 %) reaches it.",
)
@click.option("--agent-model", metavar="NAME", help="The model of claude, codex, gemini, opencode, pi or qwen.")
@click.option("--agent-effort", metavar="LEVEL", help="The reasoning effort of claude, codex or opencode.")
@click.option("--max-cost", type=Finite(0, 1e9, min_open=True), help="Stop at so many dollars, as agents tell them.")
@click.option("--engine", type=click.Choice(ENGINES), help="Default: prime-rl on two GPUs, else trl.")
@GPUS
@click.option("--budget-seconds", type=float, help="Another training budget: other rules, so a fresh baseline.")
@click.option(
    "--agent-timeout",
    "agent_timeout_seconds",
    type=Finite(min=1),
    default=900.0,
    show_default=True,
    help="Seconds for one proposal.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of search, tpe and random.")
@SANDBOX
@AGENT_ENV
@AGENT_SEES
@click.option(
    "--pairs",
    default="1",
    callback=num_slots,
    help="Runs side by side, on GPUs or cores of their own; auto: as many as fit (doctor shows it).",
)
@SLURM
@click.option(
    "--notify",
    metavar="COMMAND",
    help="Run it at a keep, a crash that repeats, an agent that cannot be asked, and the end, with JSON on its stdin.",
)
@BRANCH
@click.option("--allow-sleep", is_flag=True, help="Let this machine fall asleep during the night.")
@click.option("--detach", is_flag=True, help="Return when the first run trains; nightshift wait --night follows it.")
@click.option(
    "--stop",
    is_flag=True,
    help="Cancel the jobs in SLURM of a night whose controller was killed; with no other option.",
)
@click.option("--controller-job", is_flag=True, help="With --slurm: run the night itself in a job, without GPUs.")
def night(
    stop: bool,
    slurm: Path | None,
    notify: str | None,
    allow_sleep: bool,
    detach: bool,
    controller_job: bool,
    **flags: Any,
) -> None:
    """Propose, train, decide, record, until a stop rule holds; the same command goes on after a kill or reboot.

    A command as --agent gets the prompt on stdin, or in a file where it says {prompt_file}. To stop: Ctrl-C lets the
    runs in flight finish, a second one stops now; so does a file STOP in the checkout, after the experiment. A night
    that is killed leaves no process on this machine; jobs in SLURM go on, and the same command takes them over.
    """
    with reporting("loading what a night needs"):
        from nightshift.night.start import create_branch, night, stop_night
        from nightshift.night.state import NightRequest
    if stop:
        print_text(stop_night(run.process_root()))
        return
    if slurm and flags["pairs"] != 1:
        raise click.UsageError("--pairs and --slurm do not go together. Write pairs in slurm.toml.")
    if flags["agent"] is None:
        raise click.UsageError("--agent is missing. Write who proposes: --agent tpe, or --agent claude.")
    branch = flags.pop("branch")
    request, root = NightRequest(**flags, slurm=str(slurm) if slurm else None), run.process_root()
    if controller_job:
        if slurm is None or detach:
            raise click.UsageError("--controller-job needs --slurm, and goes without --detach.")
        from nightshift.executors.slurm import read, submit_controller

        words = [word for word in sys.argv[1:] if word != "--controller-job"]
        with reporting("submitting the night as a job"):
            name = submit_controller(root, read(slurm), words)
        print_text(f"job {name} runs the night; to end it, create the file STOP\nuv run nightshift wait --night")
        return
    if detach:
        with reporting() as reporter:
            create_branch(root, request, reporter, branch)
        ledger, since = Ledger(root), time.time()
        with reporting("waiting for the first run to train"):
            has_begun = partial(is_under_way, ledger, since)
            sys.exit(run.start_detached(ledger, has_begun, "uv run nightshift wait --night"))
    with closing(TerminalReporter()) as reporter:
        exit_code = night(root, request, reporter, print_text, notify, allow_sleep, branch)
    sys.exit(exit_code)


@commands.command()
@click.option("--engine", type=click.Choice(ENGINES), help="Default: what run.py would use here.")
@GPUS
@click.option(
    "--prime-rl", type=click.Path(path_type=Path), callback=use_prime_rl, help="Folder of prime-rl, if not the default."
)
@click.option("--agent", help="Also ask this agent one question, as a night would: the only proof of its login.")
@SANDBOX
@AGENT_ENV
@AGENT_SEES
@click.option("--environment", help="Only this one: load it, show a task, time and try its reward.")
@SLURM
@AS_JSON
def doctor(
    agent: str | None,
    sandbox: str,
    agent_env: tuple[str, ...],
    agent_sees: tuple[str, ...],
    environment: str | None,
    slurm: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Check what both engines need, changing nothing; exits 2 if run.py could not start here.

    With --slurm: run it in one job on a node of the cluster.
    """
    from nightshift.agents.agent import check_agent
    from nightshift.engines.doctor import Doctor, checks
    from nightshift.evaluation.template import look
    from nightshift.executors.slurm import SlurmExecutor, read, run_on_node
    from nightshift.experiment.experiment import open_controller

    root, given, node = run.process_root(), PrepareFlags(**flags), ""
    if as_json and environment:
        raise UsageError("--json is of the checks of a machine", "Leave --environment out.")
    if environment is not None:
        with reporting(f"loading {environment}"):
            for line in look(root, environment):
                print_text(line)
        return
    if slurm is not None:
        with reporting() as reporter:
            executor = SlurmExecutor(root, os.environ, read(slurm))
            executor.require_ready()
            engine = open_controller(root, Request(engine=given.engine, slurm=slurm), reporter).bench.engine.name
            reporter.note("one job is submitted; it may have to wait for its turn (Ctrl-C cancels it)")
            node, answer = run_on_node(executor, ("doctor", "--json", "--engine", engine))
        report = msgspec.json.decode(answer, type=Doctor)
    else:
        with reporting("looking at what experiments need"):
            rules = rules_here(root, given.engine_meant, num_gpus(os.environ))
            found = run.checkout_checks(root) + checks(root, rules, dict(os.environ), given)
            found += [check_agent(agent, sandbox, root, dict(os.environ), agent_env, agent_sees)] if agent else []
        report = Doctor.of(found, rules)
    print_found(report, filter(None, [node, report.table(given.engine_meant)]), as_json)
    sys.exit(ExitCode.MEASURED if report.is_ready else ExitCode.USAGE)


@commands.command()
@click.argument("what", type=click.Choice(["environment"]))
@click.argument("name")
def new(what: str, name: str) -> None:
    """Write environments/NAME: a small task that trains as it is, with its test. docs/environments.md goes on."""
    from nightshift.evaluation.template import create

    print_text(*create(run.process_root(), name))


@commands.command()
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder to write into. Default: runs/")
@click.option("--branch", help="The campaign to show. Default: the branch checked out, else that of the last one.")
@click.option("--serve", "is_served", is_flag=True, help="Write no file; serve the page to a browser until Ctrl-C.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="With --serve; 0: any free port."
)
def report(output: Path | None, branch: str | None, is_served: bool, port: int) -> None:
    """Write the morning page report.html, with progress.svg and report.md, from the records."""
    from nightshift.report import page
    from nightshift.report.serve import serve

    root = run.process_root()
    if is_served:
        if output is not None:
            raise UsageError("--serve writes no file", "Leave --output out.")
        return serve(root, branch, port, print_text)
    with reporting("drawing the page"):
        is_live = Ledger(root).is_running()
        headline, paths = page.write_report(root, datetime.now(UTC), output, branch, is_live=is_live)
    print_text(f"{headline.title}. {headline.sentence}", *map(os.fspath, paths))


@commands.command()
@click.argument("old", default="incumbent")
@click.argument("new", default="working")
@AS_JSON
@reporting("reading the records")
def diff(old: str, new: str, as_json: bool) -> None:
    """Compare two train.toml key by key: what OLD -> NEW changes. Default: incumbent -> working.

    OLD and NEW are experiments (42), commits, baseline, incumbent or working (the file as it stands).
    """
    from nightshift.report.diff import Diff, find

    root = run.process_root()
    ledger, repo = Ledger(root), Repo(root)
    changes = Diff.of(find(old, root, ledger, repo), find(new, root, ledger, repo))
    print_found(changes, [str(changes)], as_json)


@commands.command()
@click.argument("number", type=click.IntRange(min=1))
@AS_JSON
@reporting("reading the records")
def show(number: int, as_json: bool) -> None:
    """Print everything that is known of one experiment."""
    from nightshift.campaign.campaign import Campaign
    from nightshift.campaign.results import fates_of, row
    from nightshift.cli.status import experiment_lines, shown

    ledger = Ledger(run.process_root())
    record, (records, _) = ledger.record(number), ledger.readable()
    try:
        campaign = Campaign.read(ledger, records, record.branch, record.rules_hash)
        [found], unread = campaign.rows([record]), campaign.unread
    except UsageError as error:  # another record is damaged
        ours = [r for r in records if (r.branch, r.rules_hash) == (record.branch, record.rules_hash)]
        found, unread = row(record, fates_of(ours)), str(error)
    print_found(shown(ledger, record, found), experiment_lines(record, found), as_json)
    if unread:
        print_error(unread)


@commands.command("export")
@click.option("--to", "form", type=click.Choice([*_ENDINGS]), required=True, help="What opens it.")
@click.option("--output", help="File, or new folder; - writes csv or rl.toml to stdout. Default: in runs/export.")
@click.option("--branch", help="The campaign. Default: the branch checked out, else that of the last one.")
@click.option(
    "--experiment", type=click.IntRange(min=1), help="model, rl.toml: of another experiment than the incumbent."
)
@reporting("reading the records")
def export_command(form: str, output: str | None, branch: str | None, experiment: int | None) -> None:
    """Write a campaign as a table or as offline W&B runs; or its model or config.

    csv has a column for every key, and the texts of proposals and verdicts. wandb has keys, scores and steps, but no
    free text and no path. model is the incumbent's weights with a card that says how they were made and what is
    certified of them. rl.toml is the config that the incumbent trained with on prime-rl, which prime-rl accepts.
    """
    from nightshift.report.data import Story

    root = run.process_root()
    story = Story.of(Ledger(root), branch)
    if not story.records:
        raise UsageError("no experiment was run here yet", "Start one: uv run run.py.")
    if experiment is not None and form not in _OF_ONE:
        raise UsageError(f"--experiment {experiment} is for --to {' and '.join(_OF_ONE)}", "Leave it out.")
    if output == "-":
        if form not in _TEXTS:
            raise UsageError(f"--output -: {form} is no text", f"Name a place for it; {' and '.join(_TEXTS)} go there.")
        print_text(_text(form, story, root, experiment).decode().removesuffix("\n"))
    else:
        path = Path(output or root / "runs" / "export" / f"{story.tag}{_ENDINGS[form]}")
        if output:
            path = _write(form, story, root, path, experiment)
        else:  # the export before goes when the new one is whole
            new = path.with_name(f".new-{path.name}")
            remove_tree(new)
            _write(form, story, root, new, experiment)
            remove_tree(path)
            new.rename(path)
        print_text(f"{path}: {_OF_ONE.get(form, f'{len(story.rows)} experiments')} of {story.branch}")
    for note in story.notes:
        print_error(note)


def _write(form: str, story: Story, root: Path, path: Path, experiment: int | None) -> Path:
    from nightshift.report.export.model import copy_model
    from nightshift.report.export.wandb_runs import write_runs

    if form == "wandb":
        return write_runs(story, path)
    if form == "model":
        return copy_model(story, experiment, path)
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is no regular file", "Name another place: --output PATH, or - for stdout.")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, _text(form, story, root, experiment))
    return path


def _text(form: str, story: Story, root: Path, experiment: int | None) -> bytes:
    from nightshift.report.export.rl_toml import as_rl_toml
    from nightshift.report.export.table import as_csv

    return as_rl_toml(story, experiment, root, os.environ) if form == "rl.toml" else as_csv(story)


@commands.command("import")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def import_command(file: Path) -> None:
    """Write train.toml from the config FILE, and the lines of rules.toml that carry over; commit what changed.

    FILE is a config of prime-rl with today's names or older ones, autoresearch-rl's train.toml, or a config of prime's
    hosted training. Every key that train.toml cannot hold is listed with its owner. FILE is kept as imported.toml.
    """
    root = run.process_root()
    source = file.read_bytes()
    imported = import_config(source, file.name)
    repo = Repo(root)
    ledger = Ledger(root)
    with ledger.lock():
        head = repo.head()
        if any(record.branch == head.branch for record in ledger.records()):
            raise UsageError(f"{head.branch} is a campaign", "Import on your own branch: git switch BRANCH.")
        blobs = repo.files_at(head.commit) if head.commit else {}
        for name in (CONFIG_NAME, RULES_NAME, IMPORTED_NAME):
            if repo.differs(name, blobs[name]) if name in blobs else os.path.lexists(root / name):
                raise UsageError(f"{name} has changes that are not committed", "Commit them, or move the file away.")
        rules, notes = carried_rules(imported, root, num_gpus(os.environ))
        files = {CONFIG_NAME: imported.train_toml(file.name), IMPORTED_NAME: source, RULES_NAME: rules}
        files = {name: data for name, data in files.items() if name not in blobs or read_file(root / name) != data}
        for name, data in files.items():
            write_atomically(root / name, data)
        outcome = f"wrote {', '.join(files)}; "
        if not files:
            outcome = "nothing changed: this config was imported before"
        elif head.branch and head.commit:
            committed = repo.commit_files(head, files, f"Import {clean(file.name, 80)}")
            outcome += f"committed as {(committed.commit or '')[:7]} on {head.branch}"
        else:
            outcome += "not committed: no branch is checked out"
    print_text(*imported.report(), *notes, outcome, "next: uv run run.py --dry-run")
