"""The training plan of the embedded pair for `python -m demo.train`: data, order and length."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moa.drafters.attention.training import DistillSettings
from moa.training.loop import LoopSettings
from moa.training.masks import AnchorRule, Spacing

ROW = 256
LONGEST_CHAT = 3
"""Exercises in one conversation, so that the target learns to continue after an answer."""
TALK, MIXED = 0.08, 0.08
"""Shares of turns with small talk, and of turns that ask for two skills at once."""


@dataclass(frozen=True)
class Mix:
    """How many tokens of what; the skills in `more` come twice as often."""

    exercises: int
    code: int
    english: int
    more: tuple[str, ...]
    seed: int
    plain: float = 0.0
    """Share of turns in the words of people who do not know the exercises."""
    wider: float = 0.0
    """Share of such turns with words beyond the exercises' lists."""
    talk: float = TALK
    """Share of small talk among the other turns."""

    def of(self, tokens: int) -> Mix:
        """The same mix of about so many tokens."""
        share = tokens / (self.exercises + self.code + self.english)
        sizes = {
            name: round(getattr(self, name) * share) for name in ("exercises", "code", "english")
        }
        return replace(self, **sizes)


@dataclass(frozen=True)
class Course:
    """One phase of the target's training: one learning-rate schedule over one mix."""

    name: str
    mix: Mix
    settings: LoopSettings

    def of(self, tokens: int) -> Course:
        """About so many tokens in the same mix, under a name of its own: its rows are not taken for
        the whole's."""
        return replace(self, name=f"{self.name}-{tokens}", mix=self.mix.of(tokens))


COURSES = (
    Course(
        "widen",
        Mix(
            5_000_000,
            1_900_000,
            1_500_000,
            ("arithmetic", "word_problem", "filter", "table", "sort", "function"),
            7,
        ),
        LoopSettings(steps=560, batch=32, learning_rate=2e-3, warmup=30, checkpoint_every=50),
    ),
    Course(
        "sharpen",
        Mix(
            760_000,
            140_000,
            120_000,
            ("edit", "count", "function", "story", "word_problem", "compare"),
            8,
        ),
        LoopSettings(steps=120, batch=32, learning_rate=1e-3, warmup=10, checkpoint_every=30),
    ),
    Course(
        "practice",
        Mix(
            2_080_000,
            110_000,
            110_000,
            ("edit", "count", "function", "story", "word_problem", "sort"),
            9,
        ),
        LoopSettings(steps=180, batch=32, learning_rate=1.5e-3, warmup=8, checkpoint_every=30),
    ),
    Course(
        "everyday",
        Mix(
            385_000,
            12_000,
            12_000,
            ("edit", "function", "arithmetic", "word_problem"),
            10,
            plain=0.6,
        ),
        LoopSettings(steps=100, batch=16, learning_rate=8e-4, warmup=5, checkpoint_every=10),
    ),
    Course(
        "settle",
        Mix(
            285_000,
            10_000,
            10_000,
            ("edit", "function", "count", "json", "filter", "sort"),
            11,
            plain=0.45,
        ),
        LoopSettings(steps=75, batch=16, learning_rate=5e-4, warmup=4, checkpoint_every=10),
    ),
    Course(
        "relearn",
        Mix(
            1_100_000,
            50_000,
            50_000,
            ("edit", "function", "json", "sort", "filter", "word_problem", "story"),
            15,
            plain=0.12,
            wider=0.3,
            talk=0.11,
        ),
        LoopSettings(steps=600, batch=16, learning_rate=1.2e-3, warmup=6, checkpoint_every=10),
    ),
    Course(
        "finish",
        Mix(
            500_000,
            20_000,
            20_000,
            ("edit", "count", "function", "word_problem", "story"),
            16,
            plain=0.1,
            wider=0.42,
        ),
        LoopSettings(steps=260, batch=16, learning_rate=9e-4, warmup=6, checkpoint_every=10),
    ),
)
"""The embedded target is no straight line of these. `relearn` began from a mean of three: before
`everyday`, after `settle`, and after 142 steps more, which are not kept. The embedded weights are
0.4 of those after `relearn` and 0.6 of those after `finish` (docs/log). A repetition in order is
another target."""
REVISION = Course(
    "revise",
    Mix(
        666_000,
        15_000,
        15_000,
        ("arithmetic", "word_problem", "date", "filter", "edit", "function"),
        12,
        plain=0.3,
    ),
    COURSES[4].settings,
)
"""Mostly old exercises, for the drafter alone: the target keeps what `settle` left."""


@dataclass(frozen=True)
class DrafterCourse:
    """One phase of the drafter's training, on the rows of one of the target's phases."""

    name: str
    rows: Course
    settings: LoopSettings
    distill: DistillSettings


DRAFTER_LAYERS = (0, 1, 4, 7)
"""The target's layers from which the drafter's body starts: the four that predict most of its text
without the others."""
DRAFTER_SHAPE = {
    "layers": len(DRAFTER_LAYERS),
    "num_attention_heads": 8,
    "self_attention_num_key_value_heads": 2,
    "self_attention_intermediate_size": 128,
    "cross_attention_num_key_value_heads": 2,
    "cross_attention_intermediate_size": 32,
    "layer_self_attention_num_key_value_heads": 2,
    "layer_self_attention_intermediate_size": 64,
    "final_norm": True,
    "final_state": True,
}
ALONE = DistillSettings(
    anchors=AnchorRule(spacings=(Spacing(4, 12, 0.45), Spacing(32, 64, 0.08)), cold=0.4)
)
"""Almost half with records a few tokens late, as in drafting; almost half without records, as
offline; the others very late, or with only the prompt's."""
_FOLLOWING = DistillSettings(
    anchors=AnchorRule(spacings=(Spacing(4, 12, 0.34), Spacing(32, 64, 0.06)), cold=0.25)
)
"""The same with more documents that have only their prompt's records."""

_COLD = DistillSettings(
    anchors=AnchorRule(spacings=(Spacing(4, 12, 0.4), Spacing(32, 64, 0.06)), cold=0.5)
)
"""The same with more documents without records."""

DRAFTER_COURSES = (
    DrafterCourse(
        "follow",
        COURSES[0],
        LoopSettings(steps=665, batch=16, learning_rate=1.3e-3, warmup=30, checkpoint_every=50),
        _FOLLOWING,
    ),
    DrafterCourse(
        "alone",
        COURSES[2],
        LoopSettings(steps=445, batch=16, learning_rate=2e-3, warmup=30, checkpoint_every=50),
        ALONE,
    ),
    DrafterCourse(
        "everyday",
        COURSES[3],
        LoopSettings(steps=100, batch=16, learning_rate=1e-3, warmup=5, checkpoint_every=10),
        ALONE,
    ),
    DrafterCourse(
        "settle",
        COURSES[4],
        LoopSettings(steps=60, batch=16, learning_rate=6e-4, warmup=4, checkpoint_every=10),
        ALONE,
    ),
    DrafterCourse(
        "revise",
        REVISION,
        LoopSettings(steps=170, batch=16, learning_rate=1e-3, warmup=6, checkpoint_every=5),
        _COLD,
    ),
    DrafterCourse(
        "relearn",
        COURSES[5],
        LoopSettings(steps=300, batch=16, learning_rate=1e-3, warmup=6, checkpoint_every=10),
        _COLD,
    ),
    DrafterCourse(
        "finish",
        COURSES[6],
        LoopSettings(steps=240, batch=16, learning_rate=9e-4, warmup=6, checkpoint_every=10),
        _COLD,
    ),
    DrafterCourse(
        "repeat",
        COURSES[5],
        LoopSettings(steps=340, batch=16, learning_rate=1.3e-3, warmup=6, checkpoint_every=10),
        _COLD,
    ),
)
"""Of `follow`, the embedded drafter's first 480 steps ran beside earlier stages of the target,
which are not kept: a repetition learns from the finished target throughout. The drafter before
`relearn` is 0.3 of the weights before `revise` and 0.7 of those after it; the embedded one is 0.8
of the weights after `repeat` and 0.2 of those after 190 steps more of `finish`. `relearn` ran
beside the target after its own `relearn`, the last two beside the embedded target (docs/log)."""


def plan() -> str:
    """Both trainings in a few lines."""
    lines = ["target:"]
    for course in COURSES:
        mix, loop = course.mix, course.settings
        lines.append(
            f"  {course.name:9} {loop.steps} steps of {loop.batch} rows of {ROW} tokens, rate {loop.learning_rate:g};"
            f" tokens of exercises {mix.exercises:,}, code {mix.code:,}, English {mix.english:,}"
        )
    lines.append(
        f"drafter, a body that starts as the target's layers {', '.join(map(str, DRAFTER_LAYERS))}:"
    )
    for stretch in DRAFTER_COURSES:
        loop, anchors = stretch.settings, stretch.distill.anchors
        spaced = ", ".join(f"{s.share:.0%} every {s.low}-{s.high} tokens" for s in anchors.spacings)
        lines.append(
            f"  {stretch.name:9} {loop.steps} steps of {loop.batch} rows of `{stretch.rows.name}`,"
            f" rate {loop.learning_rate:g}; anchors in {spaced}, {anchors.cold:.0%} of the documents cold"
        )
    return "\n".join(lines)
