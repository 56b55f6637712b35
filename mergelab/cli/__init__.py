"""The command line: translates, prints, and ends with the exit codes of ``mergelab.errors``.

Every command lives in a file of its own and imports the rooms it needs when it runs, so that ``--help`` is quick and
never loads torch. stdout carries data, stderr prose and progress.
"""

from __future__ import annotations

import errno
import sys
from typing import Any

import click

from mergelab import __version__
from mergelab.cli.bench import bench
from mergelab.cli.check import check
from mergelab.cli.diagnose import diagnose
from mergelab.cli.doctor import doctor
from mergelab.cli.evaluate import evaluate
from mergelab.cli.export_tower import export_tower
from mergelab.cli.families import families
from mergelab.cli.import_samples import import_samples
from mergelab.cli.merge import merge
from mergelab.cli.mergekit import export_mergekit, import_mergekit
from mergelab.cli.methods import methods
from mergelab.cli.pairs import pairs
from mergelab.cli.plan import plan
from mergelab.cli.regrade import regrade
from mergelab.cli.report import report
from mergelab.cli.run import run
from mergelab.cli.screen import screen
from mergelab.cli.sink import sink
from mergelab.cli.tasks import tasks
from mergelab.errors import MachineError, MergelabError

INTERRUPTED = 130

DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
)
"""What an output path meets: a full, read-only or broken disk, no permission, a file where a folder should be."""


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
        except (MemoryError, RuntimeError) as error:
            # By name, for torch is not imported here: its error is the one that allocators raise.
            if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
                raise
            click.echo(f"Error: out of memory: {error}. Use a larger device, or --device cpu.", err=True)
            sys.exit(MachineError.exit_code)
        except BrokenPipeError:  # the reader of our output (head, less) has left
            sys.exit(0)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            where = f"{error.filename}: " if error.filename is not None else ""
            click.echo(f"Error: {where}cannot be written: {error.strerror}. Free or choose another place.", err=True)
            sys.exit(MachineError.exit_code)


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


COMMANDS = (
    *(run, plan, merge, sink, diagnose, screen, evaluate, report, methods, pairs, tasks, bench),
    *(check, families, doctor, regrade, export_tower, export_mergekit, import_mergekit, import_samples),
)

for command in COMMANDS:
    main.add_command(command)
