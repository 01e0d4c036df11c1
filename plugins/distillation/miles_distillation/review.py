"""Checks of a plan: the teachers exist, have the student's tokenizer, and have the parts needed for scoring."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact

CHECKPOINT = "model.hf_checkpoint"


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """See ``Plugin.review``."""
    return Review(problems=tuple(_problems(facts)))


def split(value: object) -> tuple[str, ...]:
    """The entries of a list option, whose fact joins them with commas."""
    return tuple(part for part in str(value or "").split(",") if part)


def choose_teachers(frozen: tuple[str, ...], named: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the teachers: ``named`` by the user, or else the only frozen policy; empty if there is not exactly one."""
    return named or (frozen if len(frozen) == 1 else ())


def _problems(facts: Facts) -> Iterator[Problem]:
    roles = {name: facts.value(f"policies.{name}.role") for name in facts.policies}
    frozen = tuple(name for name, role in roles.items() if role == "frozen")
    named = split(facts.value("distillation.teacher"))
    teachers = choose_teachers(frozen, named)
    if not teachers or {*teachers} - {*frozen}:
        yield Problem(
            "distillation",
            f"a frozen policy as its teacher{''.join(f', and {name} is none' for name in named if name not in frozen)}",
            f"the configuration file has the frozen policies: {', '.join(frozen) or 'none'}\nadd one there, for example policies: "
            "{student: {}, teacher: {role: frozen, hf_checkpoint: DIR}}, and name several after --distillation-teacher",
            (describe_fact(facts["distillation.teacher"]),),
        )
        return
    weights = split(facts.value("distillation.weights"))
    if weights and (len(weights) != len(teachers) or not sum(map(float, weights))):
        yield Problem(
            "distillation",
            f"one weight for each of its {len(teachers)} teachers, and a sum above 0",
            f"--distillation-weights has {len(weights)} values for {', '.join(teachers)}",
            (describe_fact(facts["distillation.weights"]),),
        )
    students = [name for name, role in roles.items() if role == "train"]
    for teacher in teachers:
        if facts.value("distillation.score_with") == "engine" and not facts.value(f"policies.{teacher}.generates"):
            yield Problem(
                "distillation",
                f"an engine for the teacher {teacher}",
                f"--distillation-score-with engine asks it for log-probabilities; write policies: {{{teacher}: {{role: frozen, generates: "
                "true}}",
                (describe_fact(facts[f"policies.{teacher}.generates"]),),
            )
        for student in students:
            yield from _compare(facts, student, teacher)
    if facts.value("distillation.refresh_interval") and len(students) != 1:
        yield Problem(
            "distillation",
            "one student to refresh its teachers from",
            f"--distillation-refresh-interval copies its weights, and the policies {', '.join(students)} train",
            (describe_fact(facts["distillation.refresh_interval"]),),
        )


def _compare(facts: Facts, student: str, teacher: str) -> Iterator[Problem]:
    """Compare the vocabularies, and for self-distillation the models, of a student and a teacher."""
    own, other = (facts.scope(name)[CHECKPOINT] for name in (student, teacher))
    if own.value == other.value:
        return
    values = tuple(
        (f"policies.{name}.{CHECKPOINT}", str(fact.value), fact.origin)
        for name, fact in ((student, own), (teacher, other))
    )
    if facts.value("distillation.refresh_interval"):
        yield Problem(
            "distillation",
            f"the student's checkpoint for its teacher {teacher}",
            "--distillation-refresh-interval copies the student's weights to it; leave hf_checkpoint of the teacher out",
            values,
        )
    mine, theirs = (vocabulary(str(fact.value)) for fact in (own, other))
    if mine is not None and theirs is not None and mine != theirs:
        yield Problem(
            "distillation",
            f"one vocabulary for the student {student} and the teacher {teacher}",
            f"{describe_difference(mine, theirs)}; a teacher scores the student's token ids, so choose one with the student's tokenizer",
            values,
        )


def describe_difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    """Name the sizes of two vocabularies, and the first token in which vocabularies of one size differ."""
    sizes = f"the student has {len(student)} tokens and the teacher {len(teacher)}"
    if len(student) != len(teacher):
        return sizes
    token, number = next(
        item for item in sorted(student.items(), key=lambda item: item[1]) if teacher.get(item[0]) != item[1]
    )
    there = f"is {teacher[token]} for the teacher" if token in teacher else "is unknown to the teacher"
    return f"{sizes}, but the student's token {number} ({token!r}) {there}"


def vocabulary(directory: str) -> Mapping[str, int] | None:
    """Token -> id of a checkpoint's ``tokenizer.json``; None if it has no such file."""
    file = Path(directory) / "tokenizer.json"
    return _read(file, file.stat().st_mtime_ns) if file.is_file() else None


@lru_cache(maxsize=8)
def _read(file: Path, changed: int) -> Mapping[str, int] | None:
    """Read a file once per version; a plan is checked many times."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        words = content["model"]["vocab"]
        if isinstance(words, list):  # a unigram model: [token, score] at the position of its id
            words = {token: number for number, (token, _) in enumerate(words)}
        return dict(words) | {added["content"]: added["id"] for added in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # on_start compares what Transformers loads
