"""The command line: translates, prints, and ends with the exit codes of ``mergelab.errors``.

Every command lives in a file of its own and imports the rooms it needs when it runs, so that ``--help`` is quick and
never loads torch. stdout carries data, stderr prose and progress.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from mergelab import __version__
from mergelab.cli.bench import bench
from mergelab.cli.evaluate import evaluate
from mergelab.cli.merge import merge
from mergelab.cli.methods import methods
from mergelab.cli.pairs import pairs
from mergelab.cli.plan import plan
from mergelab.cli.report import report
from mergelab.cli.run import run
from mergelab.cli.sink import sink
from mergelab.errors import MergelabError

INTERRUPTED = 130


class _Translating(click.Group):
    """Turns the errors users can cause into one message and an exit code; anything else keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MergelabError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted. What is finished is safe; the same command continues.", err=True)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:  # the reader of our output (head, less) has left
            sys.exit(0)


@click.group(cls=_Translating, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="mergelab")
def main() -> None:
    """Does a weight merge give a vision-language model its text ability back?

    \b
    Start here:
      mergelab run configs/ties.yaml       merge, measure, grade, and print the table
      mergelab plan configs/ties.yaml      what that would do
      mergelab methods                     merge methods and their parameters
      mergelab pairs                       model pairs that recipes can name
    """


for command in (run, plan, merge, sink, evaluate, report, methods, pairs, bench):
    main.add_command(command)
