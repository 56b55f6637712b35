"""Options that several commands share, and how they become a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from mergelab.config import Experiment, Pair

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto, cpu, cuda, cuda:N or mps; auto takes CUDA where it is.",
)
accept_option = click.option(
    "--accept-unrelated",
    is_flag=True,
    help="Go on although `mergelab check` finds unrelated or misplaced weights; recorded.",
)
inferred_option = click.option(
    "--accept-inferred",
    is_flag=True,
    help="Go on although how the vlm's names map to base's was inferred with low confidence.",
)


def pair_options(command: Command) -> Command:
    """Add the pair as an argument, or as the options --base, --vlm and --ancestor; see ``choose_pair``."""
    for decorate in reversed(
        (
            click.argument("pair", required=False, metavar="[PAIR]"),
            click.option("--base", metavar="DIR|ID", help="With --vlm instead of PAIR: folders or hub ids."),
            click.option("--vlm", metavar="DIR|ID", help="The vision-language model made from base."),
            click.option("--ancestor", metavar="DIR|ID", help="The pretrained checkpoint that both come from."),
        )
    ):
        command = decorate(command)
    return command


def choose_pair(pair: str | None, base: str | None, vlm: str | None, ancestor: str | None) -> Pair:
    """Return the pair that ``pair_options`` name.

    Raises:
        click.UsageError: Options that exclude or need each other.
        RecipeError: The pair is not valid.
    """
    if (pair is None) == (base is None) or (base is None) != (vlm is None) or (ancestor is not None and base is None):
        raise click.UsageError("Give either PAIR, or --base and --vlm (and maybe --ancestor).")
    from mergelab import config

    if pair is not None:
        return config.load_pair(pair)
    assert base is not None and vlm is not None
    return config.pair_from_folders(base, vlm, ancestor)


def sink_options(dtype: str, dtype_help: str = "Dtype of the forward pass.") -> Callable[[Command], Command]:
    """Add how a sink is measured: ``--dtype`` with this default, ``--last-layers`` and ``--prompts``."""

    def decorate(command: Command) -> Command:
        for option in reversed(
            (
                click.option(
                    "--dtype",
                    type=click.Choice(["float32", "bfloat16"]),
                    default=dtype,
                    show_default=True,
                    help=dtype_help,
                ),
                click.option(
                    "--last-layers",
                    type=click.IntRange(min=1),
                    metavar="N",
                    help="Default 10, or half of fewer than 20.",
                ),
                click.option(
                    "--prompts",
                    default="builtin-v1",
                    show_default=True,
                    metavar="FILE.jsonl",
                    help="One prompt a line.",
                ),
            )
        ):
            command = option(command)
        return command

    return decorate


def recipe_options(command: Command) -> Command:
    """Add the recipe argument and the options that change its fields."""
    for decorate in reversed(
        (
            click.argument("recipe"),
            click.option("--pair", metavar="NAME|PATH", help="Another pair than the recipe's."),
            click.option("--base", metavar="DIR|ID", help="With --vlm: a pair of folders or hub ids."),
            click.option("--vlm", metavar="DIR|ID", help="The vision-language model of that pair."),
            click.option("--ancestor", metavar="DIR|ID", help="The common ancestor of that pair."),
            click.option(
                "--limit",
                type=click.IntRange(min=1),
                metavar="N",
                help="At most N documents a task, a random subset drawn by seed.",
            ),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="KEY=VALUE",
                help="Change any field of the recipe, e.g. --set claims.margin=3. Repeatable.",
            ),
        )
    ):
        command = decorate(command)
    return command


def load_experiment(
    recipe: str,
    pair: str | None,
    base: str | None,
    vlm: str | None,
    ancestor: str | None,
    limit: int | None,
    settings: tuple[str, ...],
) -> Experiment:
    """Return the recipe with the changes of the command line, and the pair it runs on.

    Raises:
        click.UsageError: Options that exclude or need each other.
        RecipeError: Recipe or pair are not valid.
    """
    from mergelab import config

    if (base is None) != (vlm is None) or (ancestor is not None and base is None):
        raise click.UsageError("--base and --vlm go together, --ancestor with both.")
    if pair is not None and base is not None:
        raise click.UsageError("--pair and --base/--vlm exclude each other.")
    overrides = config.parse_settings(settings)
    if pair is not None:
        overrides["pair"] = pair
    if limit is not None:
        overrides["evals.limit"] = limit
    own = config.pair_from_folders(base, vlm, ancestor) if base is not None and vlm is not None else None
    return config.load_experiment(recipe, overrides, own)
