"""`uv run nightshift`: what one asks of a campaign beside running an experiment."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click import IntRange, option

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import SIDES, Comparison, Request
from nightshift.campaign.results import last_campaign
from nightshift.cli import run, shell
from nightshift.cli import status as views
from nightshift.cli.output import plain, print_error, print_found, print_tables, print_text
from nightshift.cli.progress import TerminalReporter, reporting
from nightshift.cli.shell import Finite
from nightshift.config.import_config import IMPORTED_NAME, carried_rules, import_config, merged
from nightshift.config.rules import RULES_NAME
from nightshift.config.rules_toml import chosen_in, losses_of, rules_here
from nightshift.engines.base import ENGINES, PrepareFlags
from nightshift.engines.machine import read_machine
from nightshift.errors import ExitCode, UsageError
from nightshift.executors.gpus import num_gpus
from nightshift.files import read_file, remove_tree, write_atomically
from nightshift.text import clean

if TYPE_CHECKING:
    from nightshift.report.data import Story


_ENDINGS = {"csv": ".csv", "wandb": "-wandb", "model": "-model", "rl.toml": "-rl.toml"}
_TEXTS = ("csv", "rl.toml")  # that go to stdout
_OF_ONE = {"model": "a model and its card", "rl.toml": "a config of prime-rl"}


@click.group(cls=shell.Group, help=__doc__)
def commands() -> None:
    """The group of all subcommands."""


@commands.command()
@shell.AS_JSON
@reporting("reading the records")
def status(as_json: bool) -> None:
    """What is running, for how long, and what the ledger holds."""
    from nightshift.experiment.checkout import next_start

    root = run.process_root()
    ledger = Ledger(root)
    start = next_start(ledger, Repo(root))
    found = views.Status.of(ledger, datetime.now(UTC), start or None)
    if not found.is_running and found.night is None and not found.damaged:
        run.open_ledger(f" ({start})" if start else "")
    print_found(found, found.lines(), as_json)


@commands.command()
@option("--environment", default="", help="Compare there; several joined by +.")
@option("--budget-seconds", type=float, help="Train for so long: does the winner of a short run win a long one?")
@option("--baseline", metavar="REV", help="A commit whose train.toml is the baseline. Default: the campaign's.")
@option("--incumbent", metavar="REV", help="A commit whose train.toml is the incumbent. Default: the campaign's.")
@option("--seeds", "num_seeds", type=IntRange(1, 100), help="Fresh runs of each: 3 find +5 pp in 81 %, 5 in 97 %. [3]")
@option("--resume", type=int, metavar="NNNN", help="Make the missing runs of comparison NNNN.")
@option("--dry-run", is_flag=True, help="Show the plan; read nothing of the test split.")
@shell.GPUS
@shell.SLURM
@shell.AS_JSON
def certify(dry_run: bool, gpus: str | None, slurm: Path | None, as_json: bool, **question: Any) -> None:
    """Train baseline and incumbent afresh, in all slots of the campaign, and compare them.

    Without --environment and --budget-seconds it uses the test split, and each use counts. With them it uses the
    validation split there. An unfinished comparison has a number: --resume NNNN finishes it.
    """
    from nightshift.executors.process import end_leftovers
    from nightshift.experiment import certify as certificates
    from nightshift.experiment.experiment import open_controller

    sides = {side: question.pop(side) for side in SIDES}
    revisions = {side: revision for side, revision in sides.items() if revision is not None}
    with reporting() as reporter:
        controller = open_controller(run.process_root(), Request(gpus=gpus, slurm=slurm), reporter)
        find = partial(certificates.open_task, controller, revisions=revisions, **question)
        plan = tuple(find().describe())  # a wrong question is refused before anything is ended
        comparisons = tuple[Comparison, ...]()
        if not dry_run:
            with controller.ledger.lock():
                end_leftovers(controller.bench.root, reporter.note)
                comparisons = (certificates.certify(find()),)
    certified = certificates.Certified(plan=plan, comparisons=comparisons)
    print_found(certified, plan if dry_run else [str(certified)], as_json)


@commands.command()
@option("--timeout", type=click.FloatRange(min=0), default=math.inf, help="Exit with 124 after so many seconds.")
@option("--night", is_flag=True, help="Follow the night: print what it says until it is over, then its summary.")
def wait(timeout: float, night: bool) -> None:
    """Wait for the experiment in flight and print its summary; exits as that experiment did."""
    sys.exit((views.follow_night if night else views.wait_for_verdict)(run.process_root(), timeout))


@commands.command()
@shell.AS_JSON
@reporting("reading the records")
def history(as_json: bool) -> None:
    """Show every run of the last campaign with its measured score, the scores by key and value, and untried keys."""
    from nightshift.agents.history import of_last_campaign

    memory = of_last_campaign(run.open_ledger())
    print_found(memory, (), as_json) if as_json else print_tables(str(memory))


@commands.command()
@option("--agent", help="claude, codex, gemini, opencode, pi, qwen, team:A,B, tpe, random, or a command.")
@option("--direction", metavar="TEXT|FILE", help="What the agent is to try. Default: Direction of program.md.")
@option("--only", metavar="KEYS", help="Change only these keys and tables: trainer.scheduler,trainer.optim.lr.")
@option("--hours", type=Finite(0, 10_000, min_open=True), help="No run is started that would end later.")
@option("--experiments", type=IntRange(min=1), help="Stop after so many, the baseline and the last runs included.")
@option("--plateau", type=IntRange(min=1), help="Stop when nothing was kept in so many.")
@option("--riders", type=IntRange(0, 1), default=1, show_default=True, help="Discarded changes that each run re-tests.")
@option("--certify", type=IntRange(1, 100), metavar="N", help="End with a certificate: N fresh runs of each side.")
@option("--fill/--no-fill", default=None, help="While the agent is unavailable, tpe proposes. Not with a --direction.")
@option("--until", type=Finite(0, 1, min_open=True), metavar="SCORE", help="Stop at this score (lower bound, 95 %).")
@option("--agent-model", metavar="NAME", help="The model of claude, codex, gemini, opencode, pi or qwen.")
@option("--agent-effort", metavar="LEVEL", help="The reasoning effort of claude, codex or opencode.")
@option("--max-cost", type=Finite(0, 1e9, min_open=True), help="Stop at so many dollars, as agents report them.")
@option("--engine", type=click.Choice(ENGINES), help="Default: prime-rl on two GPUs, else trl.")
@shell.GPUS
@option("--budget-seconds", type=float, help="Another training budget: other rules, so a fresh baseline.")
@option("--agent-timeout", "agent_timeout_seconds", type=Finite(min=1), default=900.0, help="Seconds a proposal [900].")
@option("--seed", type=int, default=0, show_default=True, help="Of tpe and random.")
@shell.SANDBOX
@shell.AGENT_ENV
@shell.AGENT_SEES
@option("--pairs", default="1", callback=shell.num_slots, help="Runs side by side; auto: as many as fit (see doctor).")
@shell.SLURM
@option("--notify", metavar="COMMAND", help="Run it at keeps, trouble and the end, with JSON on its stdin.")
@option("--wandb", metavar="PROJECT", help="Log each experiment in this W&B project while it runs.")
@option("--no-tag", is_flag=True, help="Do not tag the branch at the end with results.tsv and certificate.")
@shell.BRANCH
@option("--detach", is_flag=True, help="Return when the first run trains; nightshift wait --night follows it.")
@option("--stop", is_flag=True, help="Alone: cancel the SLURM jobs of a night whose controller was killed.")
@option("--controller-job", is_flag=True, help="With --slurm: run the night itself in a job, without GPUs.")
def night(
    stop: bool,
    slurm: Path | None,
    notify: str | None,
    wandb: str | None,
    no_tag: bool,
    detach: bool,
    controller_job: bool,
    **flags: Any,
) -> None:
    """Propose, train, decide, record, until a stop rule applies; the same command resumes after a kill or reboot.

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
    if wandb and find_spec("wandb") is None:
        raise UsageError("--wandb: the package wandb is not installed", "Install it: uv sync --extra wandb.")
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
        with reporting("waiting until the first run trains, at most 900 s"):
            has_begun = partial(views.is_under_way, ledger, since)
            sys.exit(run.start_detached(ledger, has_begun, "uv run nightshift wait --night"))
    with closing(TerminalReporter()) as reporter:
        exit_code = night(root, request, reporter, print_text, notify, branch, wandb, not no_tag)
    sys.exit(exit_code)


@commands.command()
@option("--engine", type=click.Choice(ENGINES), help="Default: what run.py would use here.")
@shell.GPUS
@option("--prime-rl", type=click.Path(path_type=Path), callback=shell.use_prime_rl, help="Folder of prime-rl.")
@option("--agent", help="Also ask this agent one question, as a night would: the only proof of its login.")
@shell.SANDBOX
@shell.AGENT_ENV
@shell.AGENT_SEES
@option("--environment", help="Only this one: load it, show a task, time and try its reward.")
@shell.SLURM
@shell.AS_JSON
def doctor(agent: str | None, environment: str | None, slurm: Path | None, as_json: bool, **flags: Any) -> None:
    """Check what both engines need, changing nothing; exits 2 if run.py could not start here.

    With --slurm: run it in one job on a node of the cluster.
    """
    from nightshift.agents.agent import check_agent
    from nightshift.engines.doctor import Doctor, checks
    from nightshift.evaluation.template import look
    from nightshift.executors.slurm import SlurmExecutor, read, run_on_node
    from nightshift.experiment.experiment import open_controller

    root, (sandbox, *seen) = run.process_root(), [flags.pop(name) for name in ("sandbox", "agent_env", "agent_sees")]
    given, node = PrepareFlags(**flags), ""
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
            found += [check_agent(agent, sandbox, root, dict(os.environ), *seen)] if agent else []
        report = Doctor.of(found, rules)
    print_found(report, filter(None, [node, report.table(given.engine_meant)]), as_json)
    sys.exit(ExitCode.MEASURED if report.is_ready else ExitCode.USAGE)


@commands.command()
@click.argument("what", type=click.Choice(["environment"]))
@click.argument("name")
@click.option("--turns", "has_turns", is_flag=True, help="One of two turns, for prime-rl (a verifiers environment).")
def new(what: str, name: str, has_turns: bool) -> None:
    """Write environments/NAME: a small task that trains as it is, with its test. docs/environments.md goes on."""
    from nightshift.evaluation.template import create

    print_text(*create(run.process_root(), name, has_turns))


@commands.command()
@option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder to write into. Default: runs/")
@option("--branch", help="The campaign to show. Default: the branch checked out, else that of the last one.")
@option("--serve", "is_served", is_flag=True, help="Write no file; serve the page to a browser until Ctrl-C.")
@option("--port", type=IntRange(0, 65535), default=8765, show_default=True, help="With --serve; 0: any free port.")
def report(output: Path | None, branch: str | None, is_served: bool, port: int) -> None:
    """Write the morning page report.html, with progress.png and report.md, from the records."""
    from nightshift.report import page
    from nightshift.report.serve import serve

    root = run.process_root()
    if is_served:
        if output is not None:
            raise UsageError("--serve writes no file", "Leave --output out.")
        return serve(root, branch, port, print_text)
    run.open_ledger()
    with reporting("drawing the page"):
        is_live = Ledger(root).is_running()
        view, paths = page.write_report(root, datetime.now(UTC), output, branch, is_live=is_live)
    print_text(f"{view.headline.title}. {view.headline.sentence}", *map(os.fspath, paths))


@commands.command()
@click.argument("old", default="incumbent")
@click.argument("new", default="working")
@shell.AS_JSON
@reporting("reading the records")
def diff(old: str, new: str, as_json: bool) -> None:
    """Compare two train.toml key by key: what OLD -> NEW changes. Default: incumbent -> working.

    OLD and NEW are experiments (42), commits, baseline, incumbent or working (the file as it stands).
    """
    from nightshift.report.diff import Diff, find

    ledger = run.open_ledger()
    names = ledger.root, ledger, Repo(ledger.root)
    changes = Diff.of(find(old, *names), find(new, *names))
    print_found(changes, [str(changes)], as_json)


@commands.command()
@click.argument("number", type=IntRange(min=1))
@option("--all", "is_all", is_flag=True, help="Everything that is recorded of the experiment.")
@shell.AS_JSON
@reporting("reading the records")
def show(number: int, is_all: bool, as_json: bool) -> None:
    """Print one experiment on one screen."""
    from nightshift.campaign.campaign import Campaign
    from nightshift.campaign.results import fates_of, row

    ledger = run.open_ledger()
    record, (records, _) = ledger.record(number), ledger.readable()
    try:
        campaign = Campaign.read(ledger, records, record.branch, record.rules_hash)
        [found], unread = campaign.rows([record]), campaign.unread
    except UsageError as error:  # another record is damaged
        ours = [r for r in records if (r.branch, r.rules_hash) == (record.branch, record.rules_hash)]
        found, unread = row(record, fates_of(ours)), str(error)
    document = views.shown(ledger, record, found)
    lines = views.experiment_lines(record, found, document["files"])
    print_found(document, views.all_lines(plain(document), f"{number:04d}") if is_all else lines, as_json)
    if unread:
        print_error(unread)


@commands.command()
@click.argument("number", type=IntRange(min=1))
@reporting("reading the records")
def revert(number: int) -> None:
    """Take the kept change NUMBER out of train.toml, in a commit of yours.

    Keys that later changes have set stay. A running night reads the commit as your decision.
    """
    from nightshift.campaign.campaign import Campaign
    from nightshift.campaign.commits import revert

    ledger = run.open_ledger()
    repo, records = Repo(ledger.root), ledger.records()
    head = repo.head()
    name = last_campaign([record for record in records if record.branch == head.branch])
    campaign = Campaign.of(records, *name).with_user_commits(ledger, repo)
    change = next((change for change in campaign.kept if change.experiment == number), None)
    if change is None or campaign.config is None:
        names = ", ".join(change.name for change in campaign.kept) or "nothing"
        fix = f"Kept on {head}: {names}. The last experiment ran on {records[-1].branch}."
        raise UsageError(f"{number:04d} is not kept", fix)
    losses = losses_of(ledger.root, chosen_in(ledger.root))
    commit = revert(repo, campaign.config, campaign.kept, change, losses)
    print_text(f"took out {change}", f"committed {str(commit.commit)[:7]} on {commit.branch}; to undo: git revert HEAD")


@commands.command("export")
@option("--to", "form", type=click.Choice([*_ENDINGS]), required=True, help="What opens it.")
@option("--output", help="File, or new folder; - writes csv or rl.toml to stdout. Default: in runs/export.")
@option("--branch", help="The campaign. Default: the branch checked out, else that of the last one.")
@option("--experiment", type=IntRange(min=1), help="model, rl.toml: of another experiment than the incumbent.")
@reporting("reading the records")
def export_command(form: str, output: str | None, branch: str | None, experiment: int | None) -> None:
    """Write a campaign as a table or as offline W&B runs; or its model or config.

    csv has a column for every key, and the texts of proposals and verdicts. wandb has keys, scores and steps, but no
    free text and no path. model is the incumbent's weights with a card that says how they were made and what is
    certified of them. rl.toml is the config that the incumbent trained with on prime-rl, which prime-rl accepts.
    """
    from nightshift.report.data import Story

    root = run.process_root()
    story = Story.of(run.open_ledger(), branch)
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
        return write_runs(story, path, read_machine(root).wandb.project or f"nightshift-{story.tag}")
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
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def import_command(files: tuple[Path, ...]) -> None:
    """Write train.toml from the config FILES, and the lines of rules.toml that carry over; commit what changed.

    FILES are one config of prime-rl with today's names or older ones, autoresearch-rl's train.toml, or a config of
    prime's hosted training. Of several files a later one wins, as in `rl @ base.toml @ overlay.toml`; a trainer.toml
    and an orchestrator.toml make one config. Every key that train.toml cannot hold is listed with its owner. The
    config is kept as imported.toml, from which `export --to rl.toml` starts.
    """
    root, name = run.process_root(), clean(" + ".join(file.name for file in files), 80)
    source = merged([(file.name, file.read_bytes()) for file in files])
    imported = import_config(source, name, losses_of(root, chosen_in(root)))
    repo = Repo(root)
    ledger = Ledger(root)
    with ledger.lock():
        head = repo.head()
        if any(record.branch == head.branch for record in ledger.records()):
            raise UsageError(f"{head.branch} is a campaign", "Import on your own branch: git switch BRANCH.")
        blobs = repo.files_at(head.commit) if head.commit else {}
        for path in (CONFIG_NAME, RULES_NAME, IMPORTED_NAME):
            if repo.differs(path, blobs[path]) if path in blobs else os.path.lexists(root / path):
                raise UsageError(f"{path} has changes that are not committed", "Commit them, or move the file away.")
        rules, notes = carried_rules(imported, root, num_gpus(os.environ))
        new = {CONFIG_NAME: imported.train_toml(name), IMPORTED_NAME: source, RULES_NAME: rules}
        new = {path: data for path, data in new.items() if path not in blobs or read_file(root / path) != data}
        for path, data in new.items():
            write_atomically(root / path, data)
        outcome = f"wrote {', '.join(new)}; "
        if not new:
            outcome = "nothing changed: this config was imported before"
        elif head.branch and head.commit:
            committed = repo.commit_files(head, new, f"Import {name}")
            outcome += f"committed as {(committed.commit or '')[:7]} on {head.branch}"
        else:
            outcome += "not committed: no branch is checked out"
    print_text(*imported.report(), *notes, outcome, "next: uv run run.py --dry-run")
