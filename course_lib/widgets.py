"""Your predictions, kept: say what you expect before a run, and see beside it what came.

`predict` asks. `reveal` answers, and names the belief behind a prediction that did not hold. Neither waits:
with no prediction made, a notebook runs from top to bottom all the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import ipywidgets
import traitlets

KINDS = ("measured", "paced", "modelled", "published")
TIME_UNITS = ("s", "ms", "us", "µs", "second", "seconds", "minutes")
CLOSE = 1.1  # a number within this ratio of the truth counts as predicted

_asked: dict[tuple, Prediction] = {}


def _html(text: str) -> str:
    """`text` for a page: escaped, and with what stands between backticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _number_text(number: float, unit: str = "") -> str:
    """A number as people write it: three digits, no exponent where that can be avoided."""
    size = abs(number)
    digits = f"{number:,.0f}" if 1000 <= size < 1e12 else f"{number:.3g}"
    return f"{digits} {unit}".rstrip()


class _ShowsItself(ipywidgets.VBox):
    """A box of plain widgets that leaves its text where there is no front end to draw it."""

    def text(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**options) or {}
        # The widget's own text is cut at 110 characters, and an exported page may have no widgets at all.
        return {
            **bundle,
            "text/plain": self.text(),
            "text/html": f"<p>{'<br>'.join(map(_html, self.text().splitlines()))}</p>",
        }


class Prediction(_ShowsItself):
    """A question and your answer to it. `value` is the answer: an option, a number, or None for none yet."""

    value = traitlets.Any(None, allow_none=True)

    def __init__(
        self,
        question: str,
        beliefs: Mapping[str, str] | None,
        unit: str,
        low: float | None,
        high: float | None,
        too_low: str,
        too_high: str,
    ) -> None:
        self.question = question
        self.beliefs = beliefs
        self.unit = unit
        self.low, self.high = low, high
        self.too_low, self.too_high = too_low, too_high
        self._note = ipywidgets.HTML()
        wide = ipywidgets.Layout(width="auto")
        if beliefs is not None:
            # Radio buttons: a chosen toggle button differs from its neighbours by colour alone.
            self._control: Any = ipywidgets.RadioButtons(options=list(beliefs), value=None, layout=wide)
        else:
            # Not a slider or a number field: those stand at a number from the start, which suggests it.
            hint = f"a number, in {unit}" if unit else "a number"
            self._control = ipywidgets.Text(placeholder=hint, continuous_update=False)
        self._control.tooltip = question
        super().__init__([ipywidgets.HTML(f"<b>{_html(question)}</b>"), self._control, self._note])
        self._control.observe(self._typed, "value")
        self.observe(self._chosen, "value")
        self._chosen(None)

    def answer(self, value: object) -> Prediction:
        """Make `value` your prediction; None takes it back. Raises ValueError where it cannot be one."""
        self.value = value
        return self

    @traitlets.validate("value")
    def _valid(self, proposal: Any) -> object:
        given = proposal["value"]
        if given is None:
            return None
        if self.beliefs is not None:
            if given not in list(self.beliefs):
                raise ValueError(f"{given!r} is not one of the options. Choose one of {self.listed()}.")
            return given
        return self._number(given)

    def _number(self, given: object) -> float:
        """`given` as a number in range, whether typed, measured or computed."""
        try:
            number = float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(given, bool) or not math.isfinite(number):
            raise ValueError(f"{given!r} is not a number. Write one such as 120 or 1.5.")
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if not low <= number <= high:
            raise ValueError(f"{_number_text(number, self.unit)} is out of range. Choose {self._range()}.")
        return number

    def _range(self) -> str:
        ends = [("from", self.low), ("up to", self.high)]
        return " ".join(f"{word} {_number_text(end, self.unit)}" for word, end in ends if end is not None)

    def shown(self, value: Any) -> str:
        """`value` as this question's answer is written: with its unit."""
        return _number_text(value, self.unit) if self.beliefs is None else str(value)

    def listed(self) -> str:
        """The options, as you would write them in code."""
        return ", ".join(map(repr, self.beliefs or {}))

    def _typed(self, change: Any) -> None:
        """The learner used the control."""
        typed = self._control.value
        if self.beliefs is None:
            typed = typed.strip().removesuffix(self.unit).strip() or None
        try:
            self.value = typed
            self._say(self._state())
        except ValueError as error:
            self._say(f"{error} {self._state()}")

    def _chosen(self, change: Any) -> None:
        """The value changed: by the control, or by a program."""
        if self.beliefs is not None:
            self._control.value = self.value
        else:
            self._control.value = "" if self.value is None else f"{self.value:.15g}"
        self._say(self._state())

    def _say(self, text: str) -> None:
        self._note.value = f'<span role="status">{_html(text)}</span>'

    def _state(self) -> str:
        if self.value is None:
            return "No prediction made yet." + (f" Choose {self._range()}." if self._range() else "")
        return f"Your prediction: {self.shown(self.value)}."

    def text(self) -> str:
        options = "" if self.beliefs is None else f"\n  options: {self.listed()}"
        how = " Without buttons, `.answer(...)` makes one." if self.value is None else ""
        return f"Predict: {self.question}{options}\n  {self._state()}{how}"


def predict(
    question: str,
    options: Mapping[str, str] | Iterable[str] | None = None,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    too_low: str = "",
    too_high: str = "",
) -> Prediction:
    """Ask for a prediction: one of `options`, or a number where there are none. Nothing is chosen at first.

    options: each option and the belief behind it ("small buckets start sooner, and nothing else counts"),
    which `reveal` names where it did not hold; or the options alone. unit, low, high: of a number. too_low,
    too_high: the belief behind a number under or over the truth. Asking the same question again in this
    kernel gives the same prediction, so that running its cell again keeps the answer. Raises ValueError for
    fewer than two options, for what belongs to numbers given with options, and for a range without room.
    """
    beliefs: dict[str, str] | None = None
    if options is not None:
        beliefs = dict(options) if isinstance(options, Mapping) else dict.fromkeys(options, "")
        if len(beliefs) < 2:
            raise ValueError(
                f"{len(beliefs)} options leave nothing to predict. Give two or more, or none for a number."
            )
        if unit or low is not None or high is not None or too_low or too_high:
            raise ValueError(
                "unit, low, high, too_low and too_high are for numbers. Leave them out, or the options."
            )
    if low is not None and high is not None and low >= high:
        raise ValueError(f"low={low} is not below high={high}. Give the ends of a range.")
    same = (question, tuple((beliefs or {}).items()), unit, low, high, too_low, too_high)
    if same not in _asked:
        _asked[same] = Prediction(question, beliefs, unit, low, high, too_low, too_high)
    return _asked[same]


class Reveal(_ShowsItself):
    """What you predicted beside what came. Follows your prediction when you change it."""

    def __init__(self, prediction: Prediction, truth: Any, because: str, kind: str) -> None:
        self.prediction, self.truth, self.because, self.kind = prediction, truth, because, kind
        self._page = ipywidgets.HTML()
        super().__init__([self._page])
        prediction.observe(self._draw, "value")
        self._draw(None)

    def _draw(self, change: Any) -> None:
        lines = "".join(f"<p>{_html(line)}</p>" for line in self.lines())
        self._page.value = f'<div role="status">{lines}</div>'

    def lines(self) -> list[str]:
        """What there is to say, one thing a line."""
        prediction, said = self.prediction, self.prediction.value
        came = f"{self.kind.capitalize()}: {prediction.shown(self.truth)}."
        if said is None:
            return [line for line in ("No prediction made.", came, self.because) if line]
        feedback = self._on_number(said) if prediction.beliefs is None else self._on_choice(said)
        told = [f"Your prediction: {prediction.shown(said)}.", came, *feedback, self.because]
        return [line for line in told if line]

    def _on_choice(self, said: Any) -> list[str]:
        if said == self.truth:
            return ["Your prediction held."]
        belief = (self.prediction.beliefs or {})[said]
        return ["Your prediction did not hold.", f"The belief behind it: {belief}" if belief else ""]

    def _on_number(self, said: float) -> list[str]:
        prediction, truth = self.prediction, self.truth
        belief = prediction.too_low if said < truth else prediction.too_high
        belief = f"The belief behind it: {belief}" if belief else ""
        if said == truth:
            return ["Your prediction held."]
        if said * truth <= 0:  # no ratio tells zero, or two signs, apart
            more = "more" if truth > said else "less"
            return [
                f"That is {_number_text(abs(truth - said), prediction.unit)} {more} than you said.",
                belief,
            ]
        ratio = max(said / truth, truth / said)
        if ratio <= CLOSE:
            return [f"Your prediction held, within {math.ceil((ratio - 1) * 100 - 1e-9)} %."]
        times = f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2g}"
        size = "as long as" if prediction.unit.split(" ")[0] in TIME_UNITS else "as much as"
        if abs(truth) > abs(said):
            return [f"It is {times} times {size} you said.", belief]
        return [f"You said {times} times {size} it is.", belief]

    def text(self) -> str:
        return "\n".join([self.prediction.question, *(f"  {line}" for line in self.lines())])


def reveal(prediction: Prediction, truth: Any, because: str = "", *, kind: str = "measured") -> Reveal:
    """Show what came beside what you predicted, and why.

    truth: the right option, or the number, in the unit of the question. because: why it came so. kind: where
    the truth is from: "measured", "paced", "modelled" or "published". Raises ValueError for a truth that
    could not have been predicted, and for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known. Use one of {', '.join(KINDS)}.")
    if prediction.beliefs is not None and truth not in list(prediction.beliefs):
        raise ValueError(f"truth={truth!r} is not one of the options. They are {prediction.listed()}.")
    if prediction.beliefs is None:
        try:
            truth = float(truth)
        except (TypeError, ValueError):
            truth = math.nan
        if not math.isfinite(truth):
            raise ValueError("truth has to be a number, since the question asked for one.")
    return Reveal(prediction, truth, because, kind)
