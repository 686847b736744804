"""Word problems in plain English with two or three worked steps, for a small pretrained model.

A story has an opening, one or two events and a question. Their sentences, without names, things and
numbers, are its template; one template in ten is held out, so no training problem is worded like a
test problem. Answers are worked out line by line and end in ``#### N``. Two more tasks, on which
nothing is trained, have new sentences, and three events.
"""

from __future__ import annotations

import random
import re
from typing import Any

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import GeneratedTask, Problem, is_held_out

# fmt: off
NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kira", "Liam",
    "Mona", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Vera",
)
THINGS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "flowers", "keys", "letters", "marbles",
    "nuts", "pens", "plums", "rocks", "shells", "shirts", "spoons", "stamps", "tickets", "toys",
)
PLACES = ("bags", "baskets", "boxes", "cases", "drawers", "jars", "packs", "rows", "trays")
# fmt: on

Opening = tuple[str, str, str]  # story, answer line, sign between its two numbers or nothing
OPENINGS: tuple[Opening, ...] = (
    ("{name} has {a} {things}.", "", ""),
    ("There are {a} {things} on the table of {name}.", "", ""),
    ("{name} starts the day with {a} {things}.", "", ""),
    ("{name} has {a} {places} with {b} {things} each.", "{sum} {things} at first", "*"),
    ("In each of {a} {places} of {name} there are {b} {things}.", "{sum} {things} at first", "*"),
    ("{name} packs {a} {places} and puts {b} {things} into each.", "{sum} {things} at first", "*"),
    ("{name} has {a} red and {b} blue {things}.", "{sum} {things} at first", "+"),
    ("{name} owns {a} old {things} and {b} new ones.", "{sum} {things} at first", "+"),
    ("{name} found {a} {things}, and {friend} brought {b} more.", "{sum} {things} at first", "+"),
)
EVENTS: tuple[tuple[str, str], ...] = (
    ("Then {name} buys {n} more.", "+"),
    ("{friend} gives {name} {n} of them as a present.", "+"),
    ("Later {n} more arrive by mail.", "+"),
    ("{name} wins another {n} in a game.", "+"),
    ("Then {name} gives {n} to {friend}.", "-"),
    ("After that {n} of them get lost.", "-"),
    ("{name} sells {n} at the market.", "-"),
    ("On the way home {n} of them break.", "-"),
    ("A week later there are {n} times as many.", "*"),
    ("By magic each of them turns into {n}.", "*"),
    ("{name} makes {n} equal piles and keeps only one pile.", "/"),
    ("They are shared equally by {n} people, and {name} is one of them.", "/"),
)
QUESTIONS = (
    "How many {things} does {name} have now?",
    "How many {things} are left for {name}?",
    "What is the number of {things} in the end?",
)
NEW_OPENINGS: tuple[Opening, ...] = (
    ("Somebody gave {a} {things} to {name}.", "", ""),
    ("{a} {things} belong to {name}.", "", ""),
    ("Behind the door {name} keeps {a} {things}.", "", ""),
    ("{a} {places} stand in a shop, {b} {things} in every one.", "{sum} {things} at first", "*"),
    ("{name} filled {a} {places}, always with {b} {things}.", "{sum} {things} at first", "*"),
    ("{name} carries {a} big {things} and {b} small ones.", "{sum} {things} at first", "+"),
    ("{a} {things} of {name} are new, the other {b} are not.", "{sum} {things} at first", "+"),
)
NEW_EVENTS: tuple[tuple[str, str], ...] = (
    ("An aunt sends {n} extra ones.", "+"),
    ("In the attic {name} discovers {n} further ones.", "+"),
    ("A dog runs away with {n}.", "-"),
    ("{friend} borrows {n} and does not return these.", "-"),
    ("During the summer their number grows to {n} times what it was.", "*"),
    ("A machine makes {n} out of every single one.", "*"),
    ("{name} splits all of it evenly into {n} shares and takes just a single share.", "/"),
    ("Only one in every {n} survives a flood.", "/"),
)
NEW_QUESTIONS = (
    "Please count the {things} that {name} owns at last.",
    "What does {name} end up with?",
    "Tell me how big the collection of {name} is today.",
)
TOGETHER = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
_ANSWER = re.compile(r"####\s*(-?\d{1,9})(?!\d)")


class Stories(GeneratedTask):
    """Word problems; a reference holds ``lines`` of the solution, ``template`` and ``answer``."""

    name = "stories"
    openings, events, questions = OPENINGS, EVENTS, QUESTIONS
    missing = "no number after '####'"

    def draw(self, rng: random.Random) -> Problem:
        """Draws a problem whose totals stay within 1 to 99 and whose divisions are exact."""
        while True:
            opening = rng.randrange(len(self.openings))
            sentence, line, sign = self.openings[opening]
            a, b = rng.randint(2, 9), rng.randint(2, 9)
            if sign != "*":
                a, b = rng.randint(2, 40), rng.randint(2, 40)
            name, friend = rng.sample(NAMES, 2)
            words = {"name": name, "friend": friend, "things": rng.choice(THINGS)}
            words["places"] = rng.choice(PLACES)
            total, lines = a, []
            if sign:
                total = TOGETHER[sign](a, b)
                lines.append(line.format(sum=f"{a}{sign}{b}={total}", **words))
            texts = [sentence.format(a=a, b=b, **words)]
            events = rng.sample(range(len(self.events)), self.draw_length(rng, bool(sign)))
            totals = [total]
            for event in events:
                sentence, sign = self.events[event]
                n = rng.randint(2, 5) if sign in "*/" else rng.randint(2, 40)
                if sign == "/" and total % n:
                    break
                before, total = total, TOGETHER[sign](total, n)
                totals.append(total)
                texts.append(sentence.format(n=n, **words))
                lines.append(f"{before}{sign}{n}={total} {words['things']} then")
            question = rng.randrange(len(self.questions))
            if len(totals) == len(events) + 1 and min(totals) >= 1 and max(totals) <= 99:
                break
        texts.append(self.questions[question].format(**words))
        text = " ".join(texts)
        return Problem(
            key=text,
            text=text,
            reference={
                "lines": lines,
                "template": ".".join(map(str, (opening, *events, question))),
                "answer": total,
            },
        )

    def draw_length(self, rng: random.Random, begins_with_sum: bool) -> int:
        """Draws the number of events."""
        return 1 if begins_with_sum and rng.random() < 0.5 else 2

    def is_of_split(self, problem: Problem, split: str) -> bool:
        return is_held_out(problem.reference["template"]) == (split == "test")

    def write_answer(self, reference: dict[str, Any], rng: random.Random) -> str:
        return "\n".join([*reference["lines"], f"#### {reference['answer']}"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        found = _ANSWER.findall(completion)
        return str(int(found[-1])) if found else None


class NewSentences(Stories):
    """Stories of sentences that no training problem has, with the same operations and answers."""

    name = "new_sentences"
    openings, events, questions = NEW_OPENINGS, NEW_EVENTS, NEW_QUESTIONS


class ThreeEvents(Stories):
    """Stories with one event more than training problems have; answers have up to 54 tokens."""

    name = "three_events"

    def draw_length(self, rng: random.Random, begins_with_sum: bool) -> int:
        return 3
