"""Run nights of experiments, follow them, read and certify the results, and export them.

Begin with one experiment, uv run run.py. Then: nightshift night --agent NAME --hours 8
"""

import math
import os
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec
from click import IntRange, option

from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import SIDES, Comparison, Request
from nightshift.campaign.results import last_campaign
from nightshift.cli import run, shell
from nightshift.cli import status as views
from nightshift.cli.output import plain, print_error, print_result, print_tables, print_text
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

_ENDINGS = {"csv": ".csv", "wandb": "-wandb", "model": "-model", "rl.toml": "-rl.toml"}
_TEXTS = ("csv", "rl.toml")  # forms that can be written to stdout
_OF_ONE = {"model": "a model and its card", "rl.toml": "a config of prime-rl"}  # forms of one experiment
_BRANCH = option("--branch", help="The campaign. Default: the branch checked out, else the last campaign.")


@click.group(cls=shell.Group, help=__doc__)
def commands() -> None:
    """The group of all subcommands."""


@commands.command()
@shell.AS_JSON
@reporting("reading the records")
def status(as_json: bool) -> None:
    """Show what is running, the results so far, and what ends the night."""
    from nightshift.experiment.checkout import next_start

    root = run.process_root()
    ledger = Ledger(root)
    start = next_start(ledger, Repo(root))
    state = views.Status.of(ledger, datetime.now(UTC), start or None)
    if not state.is_running and state.night is None and not state.damaged:
        run.open_ledger(f" ({start})" if start else "")
    print_result(state, state.lines(), as_json)


@commands.command()
@option("--environment", default="", help="Compare on this environment; join several by +.")
@option("--budget-seconds", type=Finite(1, 86_400), help="Compare with this training budget.")
@option("--baseline", metavar="REV", help="The commit of the baseline's train.toml. Default: the campaign's.")
@option("--incumbent", metavar="REV", help="The commit of the incumbent's train.toml. Default: the campaign's.")
@option("--seeds", "num_seeds", type=IntRange(1, 100), help="Fresh runs of each; 1 finds only large gains. [3]")
@option("--resume", type=int, metavar="NNNN", help="Make the missing runs of comparison NNNN, with its options.")
@option("--dry-run", is_flag=True, help="Print the plan, without a use of the test split.")
@shell.GPUS
@shell.SLURM
@shell.AS_JSON
def certify(dry_run: bool, gpus: str | None, slurm: Path | None, as_json: bool, **question: Any) -> None:
    """Test the gain: train baseline and incumbent with fresh seeds, and compare them on the test split.

    Each use of the test split is counted, and makes "better" harder to reach. With --environment or --budget-seconds
    the comparison asks whether the gain transfers, on the validation split, and is not counted.
    """
    from nightshift.executors.process import end_leftovers
    from nightshift.experiment import certify as certificates
    from nightshift.experiment.experiment import open_controller

    sides = {side: question.pop(side) for side in SIDES}
    revisions = {side: revision for side, revision in sides.items() if revision is not None}
    with reporting() as reporter:
        controller = open_controller(run.process_root(), Request(gpus=gpus, slurm=slurm), reporter)
        find = partial(certificates.open_task, controller, revisions=revisions, **question)
        plan = tuple(find().describe())  # refuses wrong options before it ends leftover processes
        comparisons = tuple[Comparison, ...]()
        if not dry_run:
            with controller.ledger.lock():
                end_leftovers(controller.bench.root, reporter.note)
                comparisons = (certificates.certify(find()),)
    certified = certificates.Certified(plan=plan, comparisons=comparisons)
    print_result(certified, plan if dry_run else [str(certified), "next: uv run nightshift report"], as_json)


@commands.command()
@option("--timeout", type=click.FloatRange(min=0), default=math.inf, help="Exit with 124 after this many seconds.")
@option("--night", is_flag=True, help="Print the output of the night until it ends, then its summary.")
def wait(timeout: float, night: bool) -> None:
    """Wait for the experiment in flight and print its summary. The exit code is that of the experiment."""
    sys.exit((views.follow_night if night else views.wait_for_verdict)(run.process_root(), timeout))


@commands.command()
@shell.AS_JSON
@reporting("reading the records")
def history(as_json: bool) -> None:
    """Show every run of the last campaign with its measured score, the scores by key and value, and untried keys."""
    from nightshift.agents.history import of_last_campaign

    memory = of_last_campaign(run.open_ledger())
    print_result(memory, (), as_json) if as_json else print_tables(str(memory))


@commands.command()
@option("--agent", help="claude, codex, gemini, opencode, team:A,B, tpe, random, or a command.")
@option("--direction", metavar="TEXT|FILE", help="What the agent should try. Default: Direction in program.md.")
@option("--only", metavar="KEYS", help="Change only these keys or tables: trainer.scheduler,trainer.optim.lr.")
@option("--hours", type=Finite(0, 10_000, min_open=True), help="Start no run that would end later than this.")
@option("--experiments", type=IntRange(min=1), help="Stop after this many, the final check runs included.")
@option("--plateau", type=IntRange(min=1), help="Stop after this many without a keep.")
@option("--riders", type=IntRange(0, 1), default=1, show_default=True, help="Discarded changes that each run re-tests.")
@option("--certify", type=IntRange(1, 100), metavar="N", help="Certify at the end: N fresh runs of each config.")
@option("--fill/--no-fill", default=None, help="Let TPE propose while the agent is unavailable. Not with a direction.")
@option("--until", type=Finite(0, 1, min_open=True), metavar="SCORE", help="Stop at this score (lower bound, 95 %).")
@option("--agent-model", metavar="NAME", help="The model of claude, codex, gemini or opencode.")
@option("--agent-effort", metavar="LEVEL", help="The reasoning effort of claude, codex or opencode.")
@option("--max-cost", type=Finite(0, 1e9, min_open=True), help="Stop at this many dollars, as agents report them.")
@option("--engine", type=click.Choice(ENGINES), help="Default: prime-rl on two GPUs, else trl.")
@shell.GPUS
@option("--budget-seconds", type=Finite(1, 86_400), help="Another training budget, with a baseline of its own.")
@option(
    "--agent-timeout", "agent_timeout_seconds", type=Finite(min=1), default=900.0, help="Seconds per proposal. [900]"
)
@option("--seed", type=int, default=0, show_default=True, help="The seed of tpe and random.")
@shell.SANDBOX
@shell.AGENT_ENV
@shell.AGENT_SEES
@option("--pairs", default="1", callback=shell.num_slots, help="Runs at a time; auto: as many as fit (see doctor).")
@shell.SLURM
@option("--notify", metavar="COMMAND", help="Run this at keeps, trouble and the end, with JSON on stdin.")
@option("--wandb", metavar="PROJECT", help="Log each experiment in this W&B project while it runs.")
@option("--no-tag", is_flag=True, help="Do not tag the branch at the end.")
@shell.BRANCH
@option("--detach", is_flag=True, help="Continue in the background; nightshift wait --night prints its output.")
@option("--stop", is_flag=True, help="Only cancel the SLURM jobs of a night whose controller was killed.")
@option("--controller-job", is_flag=True, help="With --slurm: run the night itself as a job, too, without GPUs.")
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
    """Run experiments until a stop rule applies: propose, train, decide, record.

    For example: nightshift night --agent claude --hours 8

    To stop, press Ctrl-C once (the runs in flight finish) or twice (now), or create the file STOP. After a kill or a
    reboot, run the same command again to resume; SLURM jobs that survived are picked up again. A command of your own as
    --agent gets the prompt on stdin, or in the file that replaces {prompt_file}.
    """
    with reporting("loading what a night needs"):
        from nightshift.night.start import create_branch, night, stop_night
        from nightshift.night.state import NightRequest
    if stop:
        print_text(stop_night(run.process_root()))
        return
    if slurm and flags["pairs"] != 1:
        raise click.UsageError("--pairs cannot be used with --slurm. Write pairs in slurm.toml.")
    if flags["agent"] is None:
        raise click.UsageError("--agent is missing. Name the proposer: --agent tpe, or --agent claude.")
    if wandb and find_spec("wandb") is None:
        raise UsageError("--wandb: the package wandb is not installed", "Install it: uv sync --extra wandb.")
    branch = flags.pop("branch")
    request, root = NightRequest(**flags, slurm=str(slurm) if slurm else None), run.process_root()
    if controller_job:
        if slurm is None or detach:
            raise click.UsageError("--controller-job needs --slurm, and cannot be used with --detach.")
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
        with reporting("waiting until the night has begun, at most 900 s"):
            has_begun = partial(views.is_under_way, ledger, since)
            sys.exit(run.start_detached(ledger, has_begun, "uv run nightshift wait --night"))
    with closing(TerminalReporter()) as reporter:
        exit_code = night(root, request, reporter, print_text, notify, branch, wandb, not no_tag)
    sys.exit(exit_code)


@commands.command()
@option("--engine", type=click.Choice(ENGINES), help="Default: the engine that run.py would use here.")
@shell.GPUS
@option("--prime-rl", type=click.Path(path_type=Path), callback=shell.use_prime_rl, help="Folder of prime-rl.")
@option("--agent", help="Also ask this agent one question, to check its login.")
@shell.SANDBOX
@shell.AGENT_ENV
@shell.AGENT_SEES
@option("--environment", help="Check only this environment: load it, show a task, time its reward.")
@shell.SLURM
@shell.AS_JSON
def doctor(agent: str | None, environment: str | None, slurm: Path | None, as_json: bool, **flags: Any) -> None:
    """Check this machine for both engines; exit with 2 if run.py could not start. Changes nothing.

    With --slurm: check a node of the cluster, in one job.
    """
    from nightshift.agents.agent import check_agent
    from nightshift.engines.doctor import Doctor, checks
    from nightshift.evaluation.template import look
    from nightshift.executors.slurm import SlurmExecutor, read, run_on_node
    from nightshift.experiment.experiment import open_controller

    root, (sandbox, *seen) = run.process_root(), [flags.pop(name) for name in ("sandbox", "agent_env", "agent_sees")]
    given, node = PrepareFlags(**flags), ""
    if as_json and environment:
        raise UsageError("--json cannot be used with --environment", "Leave --environment out.")
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
            reporter.note("submitting one job, which may wait in the queue (Ctrl-C cancels it)")
            node, answer = run_on_node(executor, ("doctor", "--json", "--engine", engine))
        report = msgspec.json.decode(answer, type=Doctor)
    else:
        with reporting("checking what experiments need"):
            rules = rules_here(root, given.engine_meant, num_gpus(os.environ))
            results = run.checkout_checks(root) + checks(root, rules, dict(os.environ), given)
            results += [check_agent(agent, sandbox, root, dict(os.environ), *seen)] if agent else []
        report = Doctor.of(results, rules)
    print_result(report, filter(None, [node, report.table(given.engine_meant)]), as_json)
    sys.exit(ExitCode.MEASURED if report.is_ready else ExitCode.USAGE)


@commands.command()
@click.argument("what", type=click.Choice(["environment"]))
@click.argument("name")
@click.option("--turns", "has_turns", is_flag=True, help="Write an environment of two turns, for prime-rl (verifiers).")
def new(what: str, name: str, has_turns: bool) -> None:
    """Write environments/NAME: a small task that trains as it is, and its test. Next: docs/environments.md."""
    from nightshift.evaluation.template import create

    print_text(*create(run.process_root(), name, has_turns))


@commands.command()
@option("--output", type=click.Path(path_type=Path, file_okay=False), help="Write into this folder. Default: runs/.")
@_BRANCH
@option("--serve", "is_served", is_flag=True, help="Serve the page until Ctrl-C, and write no file.")
@option(
    "--port", type=IntRange(0, 65535), default=8765, show_default=True, help="The port of --serve. 0: any free port."
)
def report(output: Path | None, branch: str | None, is_served: bool, port: int) -> None:
    """Write the page report.html, the same as report.md, and progress.png, from the records."""
    from nightshift.report import page
    from nightshift.report.serve import serve

    root = run.process_root()
    if is_served:
        if output is not None:
            raise UsageError("--serve writes no file", "Leave --output out.")
        return serve(root, branch, port, print_text)
    is_live = run.open_ledger().is_running()
    with reporting("drawing the page"):
        view, paths = page.write_report(root, datetime.now(UTC), output, branch, is_live=is_live)
    print_text(view.headline.title, view.headline.sentence, *map(os.fspath, paths))


@commands.command()
@click.argument("old", default="incumbent")
@click.argument("new", default="working")
@shell.AS_JSON
@reporting("reading the records")
def diff(old: str, new: str, as_json: bool) -> None:
    """Compare two train.toml key by key. Default: the incumbent's and the working file.

    OLD and NEW: an experiment (42), a commit, baseline, incumbent, or working (the file here).
    """
    from nightshift.report.diff import Diff, find

    ledger = run.open_ledger()
    changes = Diff.of(find(old, ledger), find(new, ledger))
    print_result(changes, [str(changes)], as_json)


@commands.command()
@click.argument("number", type=IntRange(min=1))
@option("--all", "is_all", is_flag=True, help="Print everything that is recorded.")
@shell.AS_JSON
@reporting("reading the records")
def show(number: int, is_all: bool, as_json: bool) -> None:
    """Print what experiment NUMBER proposed, measured and decided, on one screen."""
    from nightshift.campaign.campaign import Campaign

    ledger = run.open_ledger()
    record, (records, _) = ledger.record(number), ledger.readable()
    campaign = Campaign.read(ledger, records, record.branch, record.rules_hash)
    [row] = campaign.rows([record])
    document = views.shown(ledger, record, row)
    lines = views.experiment_lines(record, row, document["files"])
    print_result(document, views.all_lines(plain(document), f"{number:04d}") if is_all else lines, as_json)
    if campaign.unread:
        print_error(campaign.unread)


@commands.command()
@click.argument("number", type=IntRange(min=1))
@reporting("reading the records")
def revert(number: int) -> None:
    """Take the kept change of experiment NUMBER out of train.toml, by a commit of yours.

    Keys that later changes set keep their values. A running night follows your decision.
    """
    from nightshift.campaign.campaign import Campaign
    from nightshift.campaign.commits import revert

    ledger = run.open_ledger()
    repo, records = Repo(ledger.root), ledger.records()
    head = repo.head()
    name = last_campaign([record for record in records if record.branch == head.branch])
    campaign = Campaign.of(records, *name).with_user_commits(ledger, repo)
    change, effect = next(((c, effect) for c, effect in campaign.effects if c.experiment == number), (None, None))
    if change is None or effect is None or campaign.config is None:
        names = ", ".join(change.name for change in campaign.kept) or "nothing"
        last = records[-1].branch
        other = "" if last == head.branch else f" The last experiment ran on {last}."
        raise UsageError(f"{number:04d} is not kept on {head}", f"Kept there: {names}.{other}")
    commit = revert(repo, campaign.config, campaign.kept, change)
    print_text(f"took out {change} (effect {effect.with_p})")
    print_text(f"committed {str(commit.commit)[:7]} on {commit.branch}; to undo: git revert HEAD")
    if ledger.is_running():
        command = ledger.holder or "another command"
        print_text(f"{command} continues; a certificate in progress still measures its own incumbent")
    print_text("results.tsv shows this after the next experiment, the page after: uv run nightshift report")


@commands.command("export")
@option("--to", "form", type=click.Choice([*_ENDINGS]), required=True, help="The form to write.")
@option("--output", help="File or new folder; - is stdout, for csv and rl.toml. Default: in runs/export.")
@_BRANCH
@option("--experiment", type=IntRange(min=1), help="For model and rl.toml: this experiment. Default: the incumbent.")
@reporting("reading the records")
def export_command(form: str, output: str | None, branch: str | None, experiment: int | None) -> None:
    """Export a campaign as csv or W&B runs, or the incumbent as a model or as a config of prime-rl.

    csv: a row per experiment and a column per key, with the texts of proposals and verdicts. wandb: offline runs with
    keys, scores and steps, without free text and paths. model: the incumbent's weights and a model card. rl.toml: the
    config that the incumbent trained with; prime-rl runs it.
    """
    from nightshift.report.data import Story
    from nightshift.report.export.model import copy_model
    from nightshift.report.export.rl_toml import as_rl_toml
    from nightshift.report.export.table import as_csv
    from nightshift.report.export.wandb_runs import write_runs

    root = run.process_root()
    story = Story.of(run.open_ledger(), branch)
    path = Path(output or root / "runs" / "export" / f"{story.tag}{_ENDINGS[form]}")
    if experiment is not None and form not in _OF_ONE:
        raise UsageError(f"--experiment {experiment} needs --to {' or '.join(_OF_ONE)}", "Leave it out.")
    for note in story.notes:
        print_error(note)
    if form in _TEXTS:
        text = as_csv(story) if form == "csv" else as_rl_toml(story, experiment, root, os.environ)
        if output == "-":
            return print_text(text.decode().removesuffix("\n"))
        target = path.resolve() if output else path  # an agent could put a link into runs/
        if target.exists() and not target.is_file():
            raise UsageError(f"{target} is not a regular file", "Name another file: --output PATH, or - for stdout.")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    else:
        if output == "-":
            fix = f"Name a folder: --output PATH. Only {' and '.join(_TEXTS)} can be written to stdout."
            raise UsageError(f"--output -: {form} is not a text", fix)
        new = path if output else path.with_name(f".new-{path.name}")
        if not output:
            remove_tree(new)  # of a killed process
        if form == "model":
            copy_model(story, experiment, new)
        else:
            write_runs(story, new, read_machine(root).wandb.project or f"nightshift-{story.tag}")
        if not output:  # the earlier export is removed when the new one is complete
            remove_tree(path)
            new.rename(path)
    place = path / "wandb" if form == "wandb" else path
    print_text(f"{place}: {_OF_ONE.get(form, f'{len(story.rows)} experiments')} of {story.branch}")


@commands.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def import_command(files: tuple[Path, ...]) -> None:
    """Convert the config FILES into train.toml and lines of rules.toml, and commit them.

    FILES: a config of prime-rl (today's key names or older ones), train.toml of autoresearch-rl, or a config of prime's
    hosted training. In several files the later value wins, as in `rl @ base.toml @ overlay.toml`; trainer.toml and
    orchestrator.toml are joined to one config. The command lists each key that train.toml cannot contain. The config is
    stored as imported.toml, from which `export --to rl.toml` starts.
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
        outcome = f"wrote {', '.join(new) or 'nothing, as this config was imported before'}"
        if new and head.branch and head.commit:
            committed = repo.commit_files(head, new, f"Import {name}")
            outcome += f"; committed as {(committed.commit or '')[:7]} on {head.branch}"
    print_text(*imported.report(), *notes, outcome, "next: uv run run.py --dry-run")
