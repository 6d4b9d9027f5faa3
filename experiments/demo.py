"""The demo: python -m experiments.demo. Trains 4 layers on 16K bytes of the standard library's source for 10 steps, two ranks,
predicted before and compared after; everything it writes is in results/demo."""
from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from experiments.compare import compare
from sim.errors import RankLost, UserError
from sim.model import model
from sim.strategy import Strategy


def main() -> None:
    """Exits with one line: with 2 where this machine cannot run it, with 1 where a rank was killed."""
    console = Console()
    out = Path("results/demo")
    try:
        compare(model("demo"), Strategy(sp=2, chunk=2048, prefetch=2, loss_sub=4, zero=0), 16384, "fp32", steps=10, reference=True, out=out, command="make demo", console=console)
    except (UserError, RankLost) as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
