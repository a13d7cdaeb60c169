"""The DP stepper: one step of data parallel, movement by movement, on 1 to 8 devices.

    DPStepper(net, inputs, devices=4)       buttons for the movements, a slider for the devices

Each number of devices is really run once, at the start; the picture shows the books of that run. It is SVG,
written here, so that a click shows at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets
from torch import Tensor, nn

from course_lib.dp import MOST_DEVICES, DataParallelByHand
from course_lib.dp_ledger import (
    APPLY,
    BACKWARD,
    GATHER,
    MOVEMENTS,
    REDUCE,
    REPLICATE,
    SCATTER,
    SCATTER_GRADIENTS,
    Movement,
    Step,
)
from course_lib.dp_plots import KIND_COLOURS
from course_lib.figure import QUIET_COLOUR, TEXT_COLOUR, binary_size, rank_colour

WIDTH, HEIGHT = 900, 400
_MAIN_TOP, _OTHERS_TOP, _BAR = 78, 262, 20
_LINK = _MAIN_TOP + _BAR + 32
_SAYS = {
    "": "The model and the whole batch are on device 0. The others hold nothing.",
    SCATTER: "Device 0 cuts the batch along its first dimension, keeps the first part and sends the others.",
    REPLICATE: "Device 0 sends all parameters and buffers to every other device. In every step, again.",
    APPLY: "Each device computes its part's outputs, in a thread of its own, and keeps what backward needs.",
    GATHER: "All outputs go to device 0. There the loss of the whole batch is computed.",
    SCATTER_GRADIENTS: "Backward begins on device 0. Each device gets its rows of the outputs' gradient.",
    BACKWARD: "Each device computes the gradients of its own replica's parameters.",
    REDUCE: "All gradients go to device 0, which adds them up. The replicas are thrown away.",
}


def _square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


class DPStepper(ipywidgets.VBox):
    """Buttons and a slider over a picture of all devices. Without a front end it leaves the picture.

    net: a module of one tensor; a copy of it is used. inputs: a batch for the largest number of devices; with
    n devices its first n rows_each rows are used (None: as many as make the largest number use all). loss: of
    the outputs.
    """

    def __init__(
        self,
        net: nn.Module,
        inputs: Tensor,
        devices: int = 4,
        rows_each: int | None = None,
        loss: Callable[[Tensor], Tensor] = _square,
    ) -> None:
        self.net, self.inputs, self.loss = copy.deepcopy(net), inputs, loss
        self.rows_each = rows_each or max(1, len(inputs) // MOST_DEVICES)
        self.steps = {count: self._run(count) for count in range(1, MOST_DEVICES + 1)}
        self._position = 0
        self.devices = ipywidgets.IntSlider(
            devices, 1, MOST_DEVICES, description="devices", continuous_update=False
        )
        self.previous = ipywidgets.Button(description="◀ previous", tooltip="the movement before")
        self.next = ipywidgets.Button(description="next ▶", tooltip="the next movement")
        self.picture = ipywidgets.HTML()
        super().__init__([ipywidgets.HBox([self.previous, self.next, self.devices]), self.picture])
        self.previous.on_click(lambda _: self.go(self._position - 1))
        self.next.on_click(lambda _: self.go(self._position + 1))
        self.devices.observe(lambda _: self.go(self._position), "value")
        self.go(0)

    @property
    def position(self) -> int:
        """How many movements have happened: 0 before the first."""
        return self._position

    def go(self, position: int) -> None:
        """Show the devices after `position` movements."""
        last = len(self.step().movements)
        self._position = min(max(position, 0), last)
        self.previous.disabled, self.next.disabled = self._position == 0, self._position == last
        self.picture.value = picture(self.step(), self._position)

    def step(self) -> Step:
        """The books of a step on as many devices as the slider says."""
        return self.steps[self.devices.value]

    def _run(self, count: int) -> Step:
        model = DataParallelByHand(self.net, count)
        self.loss(model(self.inputs[: self.rows_each * count])).backward()
        self.net.zero_grad()
        assert model.step is not None
        return model.step

    def text(self) -> str:
        """What the picture shows, in words."""
        return _words(self.step(), self._position)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**options) or {}
        return {**bundle, "text/html": self.picture.value, "text/plain": self.text()}


def picture(step: Step, position: int) -> str:
    """The devices of `step` after `position` movements, as SVG: what the last one copied, what each holds."""
    movement = step.movements[position - 1] if position else None
    most = max(max(sum(held.values()) for held in m.memory) for m in step.movements)
    others_most = max([1, *(sum(held.values()) for m in step.movements for held in m.memory[1:])])
    room = (WIDTH - 20) / max(1, step.devices - 1) - 12
    scale = min((WIDTH - 130) / most, min(room - 4, 240) / others_most)
    held = _held(step, movement)
    parts = [*_headline(movement), *_legend(step)]
    if movement is not None and movement.bytes:
        parts.append(
            f"<rect x='10' y='{_LINK}' width='{WIDTH - 20}' height='8' fill='{rank_colour(0)}'/>"
            + _text(WIDTH - 10, _LINK - 6, "device 0's link", 12, rank_colour(0), "end")
        )
    parts += _device(0, 10, _MAIN_TOP, held[0], scale, movement, step.used)
    for device in range(1, step.devices):
        left = 10 + (device - 1) * (room + 12)
        if movement is not None:
            parts += _arrow(movement, device, left + min(room, 110) / 2)
        parts += _device(device, left, _OTHERS_TOP, held[device], scale, movement, step.used)
    parts.append(_text(10, HEIGHT - 12, _link_words(step, position), 13, QUIET_COLOUR))
    look = f"style='max-width:{WIDTH}px;width:100%;background:white' font-family='sans-serif' role='img'"
    title = escape(_words(step, position))
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' {look}><title>{title}</title>{''.join(parts)}</svg>"


def _held(step: Step, movement: Movement | None) -> list[Mapping[str, int]]:
    if movement is not None:
        return list(movement.memory)
    start = {kind: size for kind, size in step.movements[0].memory[0].items()}
    return [start, *({} for _ in range(step.devices - 1))]


def _text(
    x: float, y: float, text: str, size: int = 12, colour: str = TEXT_COLOUR, anchor: str = "start",
    bold: bool = False,
) -> str:  # fmt: skip
    weight = " font-weight='bold'" if bold else ""
    return (
        f"<text x='{x:.0f}' y='{y:.0f}' font-size='{size}' fill='{colour}' text-anchor='{anchor}'{weight}>"
        f"{escape(text)}</text>"
    )


def _headline(movement: Movement | None) -> list[str]:
    if movement is None:
        title = "Before the step"
    elif movement.number is None:
        title = f"Between 5 and 6: {movement.name}"
    else:
        title = f"Movement {movement.number} of {len(MOVEMENTS)}: {movement.name}"
    says = _SAYS["" if movement is None else movement.name]
    return [
        _text(10, 20, title, 16, bold=True),
        _text(10, 42, says, 13),
        _text(WIDTH - 10, 20, "measured", 12, QUIET_COLOUR, "end"),
    ]


def _legend(step: Step) -> list[str]:
    seen = {kind for m in step.movements for held in m.memory for kind in held}
    parts, x = [], 10.0
    for kind, colour in KIND_COLOURS.items():
        if kind in seen:
            parts.append(f"<rect x='{x:.0f}' y='{HEIGHT - 52}' width='11' height='11' fill='{colour}'/>")
            parts.append(_text(x + 15, HEIGHT - 42, kind))
            x += 15 + 7 * len(kind) + 18
    return parts


def _device(
    device: int,
    left: float,
    top: float,
    held: Mapping[str, int],
    scale: float,
    movement: Movement | None,
    used: int,
) -> list[str]:
    """A device: its name, its bytes, and its memory as one bar, all bars on one scale."""
    total = sum(held.values())
    computes = movement is not None and any(number == device for number, _, _ in movement.work)
    name = f"device {device}" + (" computes" if computes else "" if device < used else " (unused)")
    parts = [
        f"<rect x='{left:.0f}' y='{top - 10}' width='10' height='10' fill='{rank_colour(device)}'/>",
        _text(left + 15, top, name, 13, bold=True),
    ]
    x = left
    for kind, colour in KIND_COLOURS.items():
        if size := held.get(kind, 0):
            width = size * scale
            parts.append(
                f"<rect x='{x:.1f}' y='{top + 7}' width='{max(width, 0.6):.1f}' height='{_BAR}' "
                f"fill='{colour}'><title>{kind}: {size:,} bytes</title></rect>"
            )
            x += width
    frame = rank_colour(device) if computes else "#BBBBBB"
    parts.append(
        f"<rect x='{left:.1f}' y='{top + 7}' width='{max(x - left, 40):.1f}' height='{_BAR}' fill='none' "
        f"stroke='{frame}' stroke-width='{2.5 if computes else 1}'/>"
    )
    parts.append(_text(left, top + _BAR + 22, binary_size(total) if total else "empty"))
    return parts


def _arrow(movement: Movement, device: int, x: float) -> list[str]:
    """An arrow between device 0 and another, with its bytes; nothing where nothing was copied."""
    copies = [c for c in movement.copies if device in (c.source, c.target) and c.bytes]
    if not copies:
        return []
    size = sum(copy.bytes for copy in copies)
    down = copies[0].source == 0
    start, end = (_LINK + 8, _OTHERS_TOP - 36) if down else (_OTHERS_TOP - 36, _LINK + 8)
    colour, tip = rank_colour(device), 9 if down else -9
    return [
        f"<line x1='{x:.0f}' y1='{start}' x2='{x:.0f}' y2='{end - tip}' stroke='{colour}' stroke-width='3'/>",
        f"<polygon points='{x - 6:.0f},{end - tip} {x + 6:.0f},{end - tip} {x:.0f},{end}' fill='{colour}'/>",
        _text(x, _OTHERS_TOP - 20, binary_size(size), 12, TEXT_COLOUR, "middle"),
    ]


def _link_words(step: Step, position: int) -> str:
    copies = [copy for m in step.movements[:position] for copy in m.copies]
    sent = sum(copy.bytes for copy in copies if copy.source == 0)
    received = sum(copy.bytes for copy in copies if copy.target == 0)
    return f"Device 0's link in this step so far: {binary_size(sent)} sent, {binary_size(received)} received."


def _words(step: Step, position: int) -> str:
    movement = step.movements[position - 1] if position else None
    held = _held(step, movement)
    what = "before the step" if movement is None else f"after {movement.name}"
    memory = ", ".join(f"device {d} {binary_size(sum(h.values()))}" for d, h in enumerate(held))
    return f"{step.devices} devices {what}. Memory: {memory}. {_link_words(step, position)}"
