"""Set up once what experiments need: base model, data, results.tsv. run.py does the same when something is missing.

\b
    uv run prepare.py                        # what this machine's engine needs
    uv run prepare.py --gsm8k FOLDER         # GSM8K from its official train.jsonl and test.jsonl
    uv run prepare.py --rebuild-base         # remake the tiny base model from its recipe
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # as in run.py

from pathlib import Path

import click

from nightshift import command

ROOT = Path(__file__).resolve().parent


@click.command(help=__doc__, context_settings={"max_content_width": 110})
@click.option("--engine", type=click.Choice(command.ENGINES), help="Default: prime-rl on two GPUs, else trl.")
@click.option("--gsm8k", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the data.")
@click.option("--rebuild-base", is_flag=True, help="Remake models/arithmetic-base by supervised learning.")
def main(engine: str | None, gsm8k: Path | None, rebuild_base: bool) -> None:
    """Flags in, exit code out; the work is in nightshift/preparation.py."""
    sys.exit(command.prepare(ROOT, engine, gsm8k, rebuild_base))


if __name__ == "__main__":
    main()
