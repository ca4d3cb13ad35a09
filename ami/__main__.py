"""`python -m ami neuron | cuda key=value ...`: the plan of a machine image; build=true builds it.

`python -m ami list | verify | promote | prune | clean`: see ami/verbs.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timezone

from ami import build as building
from ami import verbs
from ami.aws import Account
from ami.config import IMAGES, AmiConfig
from train.cli import compose as cli
from train.cli.command import guarded
from train.config import InputError

USED: tuple[str, ...] = ("base", "build", "regions", "profile", "subnet", "disk_gib", "compile_cache", "wheel")
USED += ("deprecate_days", "max_minutes")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in verbs.VERBS:
        return verbs.main(arguments)
    cli.add_schema(AmiConfig, "ami", [])
    parser = cli.settings_parser(
        "ami",
        AmiConfig,
        "Plan a machine image, neuron or cuda, and build it with build=true (needs Packer). Then: "
        f"{' | '.join(verbs.VERBS[:5])}.",
        examples=("neuron", "neuron base=ubuntu regions=[us-east-1,us-west-2] build=true", "promote ami-... --yes"),
        keys=USED,
    )
    names = [each for each in arguments if each in IMAGES]
    rest = [each for each in arguments if each not in IMAGES]
    given = [f"image={names[0]}", f"instance={IMAGES[names[0]]}"] if len(names) == 1 else []
    is_help = any(each in ("-h", "--help", "--version") for each in rest)

    if not given and not is_help:
        words = " ".join(arguments) or "nothing"
        wanted = " or ".join(IMAGES)
        return guarded(lambda: refuse(f"{words}: name one image, {wanted}, or one of {', '.join(verbs.VERBS[:5])}"))
    return cli.run(AmiConfig, plan, parser, arguments=rest, given=given)


def refuse(message: str) -> int:
    raise InputError(message)


def plan(cfg: AmiConfig) -> int:
    """Show what would be built and, with build=true, build it."""
    account = Account(cfg.profile)
    made = building.make_plan(account, cfg, datetime.now(timezone.utc))
    print("\n".join(building.plan_lines(made)), flush=True)
    if not cfg.build:
        print("nothing was started; build=true does it")
        return cli.DONE
    images = building.build(account, made)
    for region, image in images.items():
        print(f"made {image} in {region}")
    regions = " ".join(f"--region {region}" for region in images)
    print(f"launch takes it after: python -m ami promote {images[made.regions[0]]} {regions} --yes")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
