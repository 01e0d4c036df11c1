"""Draws ``docs/loop.svg``, the states of a run and what moves it from one to the next::

    python docs/draw_loop.py

The functions named in the boxes are those of ``miles_core/loop.py``; ``tests/docs/test_loop_picture.py`` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "loop.svg"
WIDTH, HEIGHT = 880, 790
#: The frame around the states of one step: left, top, width, height.
STEP = (70, 312, 280, 366)


@dataclass(frozen=True)
class State:
    """A box: the centre of its upper edge, its name and a line about it. ``code``: where ``miles_core/loop.py`` enters the state."""

    x: int
    y: int
    name: str
    text: str
    code: str
    kind: str = "run"
    width: int = 250

    @property
    def bottom(self) -> int:
        return self.y + 48


STATES = {
    "start": State(210, 20, "Build", "runtime, trainers, engines, transports", "build_parts("),
    "resume": State(210, 115, "Restore", "load a checkpoint, or warm start", "checkpoints.resume("),
    "first": State(210, 210, "First sync", "engines receive the learner's weights", "await sync(run, schedule,"),
    "rollout": State(210, 330, "Rollout", "generate groups and reward them", "schedule.take("),
    "learn": State(210, 425, "Learn", "advantages, losses, optimizer steps", "part.learner.learn)("),
    "sync": State(210, 520, "Sync", "encode and push the new weights", "await sync("),
    "commit": State(210, 615, "Commit", "metrics, evaluation, checkpoint if due", "checkpoints.commit("),
    "finish": State(210, 720, "Finish", "last checkpoint and export", "checkpoints.finish(", "end"),
    "roll": State(530, 545, "Roll back", "return prompts to the queue", "checkpoints.roll_back(", "fault", 210),
    "rescue": State(740, 425, "Rescue", "save the last completed step", "checkpoints.rescue(", "fault", 210),
    "recover": State(740, 115, "Recover", "replace what was lost", "await recover(", "fault", 210),
}
#: Points of an arrow, where its text is placed, and the text.
ARROWS = (
    (((210, 68), (210, 113)), None, ""),
    (((210, 163), (210, 208)), None, ""),
    (((210, 258), (210, 328)), None, ""),
    (((210, 378), (210, 423)), (220, 406), "samples"),
    (((210, 473), (210, 518)), (220, 501), "new weights"),
    (((210, 568), (210, 613)), (220, 596), "weights arrived"),
    (((210, 663), (210, 718)), (220, 702), "all steps complete"),
    (((85, 639), (40, 639), (40, 354), (83, 354)), (12, 300), "next step"),
    (((350, 354), (740, 354), (740, 165)), (370, 346), "a worker is lost"),
    (((633, 139), (337, 139)), (370, 131), "go on from the last checkpoint"),
    (((350, 449), (633, 449)), (370, 441), "error, or time is up after SIGTERM"),
    (((350, 569), (423, 569)), (352, 561), "stop signal"),
    (((530, 593), (530, 744), (337, 744)), (370, 736), "stop at a complete step"),
    (((740, 473), (740, 720)), (748, 600), "stop with the error"),
)
STYLE = (
    "text{font-family:ui-sans-serif,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
    ".name{font-size:15px;font-weight:600;text-anchor:middle}.small{font-size:12px;fill:#57606a;text-anchor:middle}"
    ".arrow{fill:none;stroke:#57606a;stroke-width:1.5}.word{font-size:12px;fill:#57606a}"
    ".run{fill:#e8f1fb;stroke:#7aa7d9}.fault{fill:#fdf0e3;stroke:#d9a066}.end{fill:#e9f6ec;stroke:#7fbf8e}"
    ".ground{fill:#ffffff}.step{fill:none;stroke:#8c959f;stroke-dasharray:5 4}"
)


def picture() -> str:
    """The whole SVG file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        "<title>The states of a run: build, restore, first sync, then rollout, learn, sync and commit for each step</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>',
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
    ]
    left, top, width, height = STEP
    parts.append(f'<rect class="step" x="{left}" y="{top}" width="{width}" height="{height}" rx="10"/>')
    parts.append(f'<text class="word" x="{left + width - 52}" y="{top + 13}">one step</text>')
    for points, place, words in ARROWS:
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline class="arrow" points="{path}" marker-end="url(#tip)"/>')
        if place:
            parts.append(f'<text class="word" x="{place[0]}" y="{place[1]}">{escape(words)}</text>')
    for state in STATES.values():
        left = state.x - state.width // 2
        parts.append(
            f'<rect class="{state.kind}" x="{left}" y="{state.y}" width="{state.width}" height="48" rx="8"/>'
            f'<text class="name" x="{state.x}" y="{state.y + 20}">{escape(state.name)}</text>'
            f'<text class="small" x="{state.x}" y="{state.y + 38}">{escape(state.text)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
