"""A prediction is asked for without suggesting one, kept, and set beside what came. It needs no front end."""

from __future__ import annotations

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from course_lib import widgets
from course_lib.widgets import Prediction, predict, reveal

BELIEFS = {
    "1 MB": "small buckets start sooner, and nothing else counts",
    "10 MB": "",
    "one bucket": "fewer transfers are always better",
}


@pytest.fixture(autouse=True)
def nothing_asked_before(monkeypatch):
    monkeypatch.setattr(widgets, "_asked", {})


def bucket() -> Prediction:
    return predict("Which `bucket_cap_mb` gives the shortest step?", BELIEFS)


def step_time() -> Prediction:
    return predict(
        "How long is a step?",
        unit="ms",
        low=0,
        high=1000,
        too_low="communication costs nothing",
        too_high="nothing overlaps",
    )


def click(prediction: Prediction, index: int) -> None:
    """What arrives when a learner clicks the option at `index`."""
    prediction._control.set_state({"index": index})


def type_in(prediction: Prediction, text: str) -> None:
    """What arrives when a learner types `text` and presses Enter."""
    prediction._control.set_state({"value": text})


def note(prediction: Prediction) -> str:
    return prediction._note.value


# Asking


@pytest.mark.parametrize("ask", [bucket, step_time])
def test_nothing_is_chosen_or_suggested_at_first(ask):
    prediction = ask()
    assert prediction.value is None
    assert prediction._control.value in (None, "")
    assert getattr(prediction._control, "index", None) is None
    assert "No prediction made yet." in note(prediction)


def test_a_click_makes_a_prediction_and_another_changes_it():
    prediction = bucket()
    click(prediction, 2)
    assert prediction.value == "one bucket"
    assert "Your prediction: one bucket." in note(prediction)
    click(prediction, 0)
    assert prediction.value == "1 MB"


def test_a_number_is_read_with_or_without_its_unit():
    prediction = step_time()
    type_in(prediction, " 120 ms ")
    assert prediction.value == 120.0
    assert prediction._control.value == "120"
    type_in(prediction, "1e2")
    assert prediction.value == 100.0
    type_in(prediction, "")
    assert prediction.value is None


@pytest.mark.parametrize(("text", "says"), [("1,5", "is not a number"), ("5000", "5,000 ms is out of range")])
def test_what_cannot_be_an_answer_is_said_beside_it_and_the_earlier_one_stays(text, says):
    prediction = step_time().answer(50)
    type_in(prediction, text)
    assert prediction.value == 50.0
    assert says in note(prediction) and "Your prediction: 50 ms." in note(prediction)
    type_in(prediction, "50")
    assert says not in note(prediction)


def test_a_program_can_answer_and_the_control_follows():
    prediction = bucket()
    assert prediction.answer("10 MB") is prediction
    assert prediction._control.index == 1
    prediction.value = "1 MB"
    assert prediction._control.index == 0
    prediction.answer(None)
    assert prediction._control.index is None and prediction.value is None
    number = step_time().answer(np.float32(12.5))
    assert number.value == 12.5 and number._control.value == "12.5"


def test_a_wrong_answer_from_a_program_is_refused_with_what_is_allowed():
    with pytest.raises(
        ValueError, match=r"'25 MB' is not one of the options\..*'1 MB', '10 MB', 'one bucket'"
    ):
        bucket().answer("25 MB")
    with pytest.raises(ValueError, match=r"out of range\. Choose from 0 ms up to 1,000 ms"):
        step_time().answer(-3)
    for wrong in ("soon", True, float("nan"), [1]):
        with pytest.raises(ValueError, match="is not a number"):
            step_time().answer(wrong)
    assert step_time().value is None


def test_asking_again_keeps_the_answer_and_another_question_has_its_own():
    bucket().answer("10 MB")
    assert bucket().value == "10 MB"
    assert bucket()._control.index == 1
    assert predict("Another one?", BELIEFS).value is None
    assert predict("Which `bucket_cap_mb` gives the shortest step?", ["1 MB", "10 MB"]).value is None


def test_questions_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="1 options leave nothing to predict"):
        predict("Which?", ["only"])
    with pytest.raises(ValueError, match="are for numbers"):
        predict("Which?", ["a", "b"], unit="ms")
    with pytest.raises(ValueError, match="low=5 is not below high=5"):
        predict("How many?", low=5, high=5)


def test_options_need_not_be_texts():
    prediction = predict("How many collectives?", [1, 2, 4])
    click(prediction, 2)
    assert prediction.value == 4
    assert "Your prediction held." in repr(reveal(prediction, 4))
    with pytest.raises(ValueError, match="Choose one of 1, 2, 4"):
        prediction.answer(3)


# Revealing


def test_a_wrong_option_is_met_with_its_own_belief_and_the_reason():
    for option in ("1 MB", "one bucket"):
        shown = reveal(bucket().answer(option), "10 MB", because="the link is busy while backward goes on")
        assert shown.lines() == [
            f"Your prediction: {option}.",
            "Measured: 10 MB.",
            "Your prediction did not hold.",
            f"The belief behind it: {BELIEFS[option]}",
            "the link is busy while backward goes on",
        ]


def test_the_right_option_holds_and_no_belief_is_corrected():
    lines = reveal(bucket().answer("one bucket"), "one bucket").lines()
    assert lines == ["Your prediction: one bucket.", "Measured: one bucket.", "Your prediction held."]


@pytest.mark.parametrize("ask", [bucket, step_time])
def test_without_a_prediction_the_truth_alone_is_told(ask):
    prediction = ask()
    truth = "10 MB" if prediction.beliefs else 231
    lines = reveal(prediction, truth, because="Because.", kind="paced").lines()
    assert lines == ["No prediction made.", f"Paced: {prediction.shown(truth)}.", "Because."]


@pytest.mark.parametrize(
    ("said", "truth", "feedback"),
    [
        (
            100,
            231,
            ["It is 2.3 times as long as you said.", "The belief behind it: communication costs nothing"],
        ),
        (231, 100, ["You said 2.3 times as long as it is.", "The belief behind it: nothing overlaps"]),
        (
            1,
            900,
            ["It is 900 times as long as you said.", "The belief behind it: communication costs nothing"],
        ),
        (100, 105, ["Your prediction held, within 5 %."]),
        (110, 100, ["Your prediction held, within 10 %."]),
        (100, 100, ["Your prediction held."]),
        (0, 50, ["That is 50 ms more than you said.", "The belief behind it: communication costs nothing"]),
        (50, 0, ["That is 50 ms less than you said.", "The belief behind it: nothing overlaps"]),
    ],
)
def test_a_number_is_compared_by_its_ratio_and_its_side_has_a_belief(said, truth, feedback):
    assert reveal(step_time().answer(said), truth).lines()[2:] == feedback


def test_what_is_not_a_time_is_as_much_and_not_as_long():
    shown = reveal(predict("How much is sent?", unit="MB").answer(2), 8400)
    assert shown.lines() == [
        "Your prediction: 2 MB.",
        "Measured: 8,400 MB.",
        "It is 4,200 times as much as you said.",
    ]


def test_a_reveal_follows_a_prediction_that_is_changed_later():
    prediction = bucket()
    shown = reveal(prediction, "10 MB")
    assert "No prediction made." in shown._page.value
    click(prediction, 0)
    assert "small buckets start sooner" in shown._page.value
    click(bucket(), 1)  # the question's cell was run again before the click
    assert "Your prediction held." in shown._page.value


def test_a_truth_that_could_not_be_predicted_is_refused():
    with pytest.raises(ValueError, match=r"truth='25 MB' is not one of the options\. They are '1 MB'"):
        reveal(bucket(), "25 MB")
    for wrong in (None, "soon", float("inf")):
        with pytest.raises(ValueError, match="truth has to be a number"):
            reveal(step_time(), wrong)
    with pytest.raises(ValueError, match=r"kind='guessed'.*measured, paced, modelled, published"):
        reveal(step_time(), 3, kind="guessed")


# Showing


def test_texts_are_escaped_on_the_page_and_code_is_set_as_code():
    prediction = predict("Is `a < b` <script>?", {"yes": "<i>sure</i>", "no": ""}).answer("yes")
    shown = reveal(prediction, "no", because="<b>so</b>")
    page = prediction.children[0].value + note(prediction) + shown._page.value
    page += prediction._repr_mimebundle_()["text/html"] + shown._repr_mimebundle_()["text/html"]
    assert "<code>a &lt; b</code>" in page and "&lt;i&gt;sure" in page
    assert not any(tag in page for tag in ("<script>", "<i>", "<b>so"))


def test_plain_python_shows_the_question_the_options_and_the_answer():
    prediction = bucket()
    assert "'1 MB', '10 MB', 'one bucket'" in repr(prediction)
    assert "No prediction made yet." in repr(prediction)
    assert "Your prediction: 10 MB." in repr(prediction.answer("10 MB"))
    assert len(repr(prediction)) > 110  # where ipywidgets would cut it
    assert prediction._repr_mimebundle_()["text/plain"] == repr(prediction)


def test_a_notebook_run_without_a_front_end_goes_on_and_leaves_text_and_widgets():
    cells = [
        "from course_lib.widgets import predict, reveal\np = predict('How many ms?', unit='ms')\np",
        "reveal(p, 231, because='Two cores, four ranks.')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    for cell, text in zip(notebook.cells, ("How many ms?", "Measured: 231 ms."), strict=True):
        (output,) = cell.outputs
        assert text in output.data["text/plain"] and text in output.data["text/html"]
        assert "application/vnd.jupyter.widget-view+json" in output.data
