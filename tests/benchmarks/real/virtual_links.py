"""The links of `benchmarks.real` in virtual time: every way of decoding with a real pair's recorded
answers and guesses, over links and times of a forward.

python -m tests.benchmarks.real.virtual_links WORK --texts 100 --level 0.3

Nothing here depends on the machine. Both ends decide as they do in use (`tests/edge/turn/priced.py`);
there are no sockets, no jitter, no loss, and answers arrive whole.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kit.figures import table
from benchmarks.real import recorded
from tests.edge.turn.priced import UNLIKELY, WAYS, Guess, Prices, cell, share_of_best

LINKS = {"loopback": 0.0, "wifi": 0.01, "5g": 0.02, "4g": 0.06, "4g-weak": 0.15}
"""Seconds of a round trip."""
FORWARDS = (0.01, 0.03, 0.06, 0.12, 0.23)
"""Seconds."""
SHIFT = 10
"""Added to each id: the world in virtual time has control tokens of its own below."""


class RecordedText:
    """As `tests.edge.turn.priced.Text`, from lines."""

    def __init__(self, text: recorded.Text) -> None:
        self.start = len(text.prompt)
        self.ids = [id + SHIFT for id in text.ids]
        self._guesses = [
            [Guess(token + SHIFT, log_prob) for token, log_prob in zip(tokens, logp, strict=True)]
            for tokens, logp in zip(text.tokens, text.logp, strict=True)
        ]

    def says(self, log: Sequence[int]) -> int:
        """The target's next token."""
        return self.ids[len(log)] if self._is_on(log) else SHIFT

    def guesses(self, log: Sequence[int]) -> list[Guess]:
        """What the sibling says may follow; behind a wrong guess, as sure as behind the right one."""
        place = len(log) - self.start
        if not 0 <= place < len(self._guesses):
            return [Guess(SHIFT + n, UNLIKELY - n) for n in range(len(self._guesses[0]))]
        if self._is_on(log):
            return self._guesses[place]
        return [guess._replace(token=SHIFT + n) for n, guess in enumerate(self._guesses[place])]

    def _is_on(self, log: Sequence[int]) -> bool:
        return len(log) < len(self.ids) and self.ids[: len(log)] == list(log)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("WORK", type=Path, help="folder of the lines")
    parser.add_argument("--texts", type=int, default=100, help="of a cell")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument(
        "--level",
        type=float,
        default=0.3,
        help="of a forward, a level of the server's drafts; 0: none",
    )
    options = parser.parse_args()
    known = recorded.texts(options.WORK, options.texts, options.tokens)
    asked = [RecordedText(text) for text in known]
    shares = []
    rows = []
    for forward in FORWARDS:
        row = [f"{1000 * forward:g} ms"]
        for round_trip in LINKS.values():
            prices = Prices(
                forward=forward, round_trip=round_trip, level_share=options.level or None
            )
            speeds = cell(asked, prices, options.tokens)
            shares.append(share_of_best(speeds))
            shown = " / ".join(f"{speeds[way]:.2f}" for way in WAYS if way != "plain")
            row.append(f"{shown}; {shares[-1]:.2f}")
        rows.append(row)
        print(f"{row[0]} is done", flush=True)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(t.kind for t in known).items())
    print(f"\n{len(known)} texts a cell: {kinds}. Times plain streaming: device / server / auto;")
    print("auto, of the best other way.\n")
    print(table(["a forward", *LINKS], rows))
    enough = sum(share >= 0.95 for share in shares)
    print(f"\nAt least 0.95 in {enough} of {len(shares)} cells; the least is {min(shares):.2f}.")


if __name__ == "__main__":
    main()
