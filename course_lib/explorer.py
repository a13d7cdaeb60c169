"""The bucket explorer: move the link and the cap, and see the step that the simulator expects.

The points that you measured are drawn where the sliders stand on the link that you measured them on.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets

from course_lib.figure import png, styled
from course_lib.pace import Pace
from course_lib.simulate import Layer, Simulation, simulate_step

CAPS_MB = (0.5, 1, 2, 4, 8, 16, 25, 100)
GBPS = (0.1, 0.2, 0.5, 1, 2, 4, 10, 25, 100)
LATENCIES_US = (5, 50, 200, 500, 1000, 2000, 5000)
RANKS = (2, 4, 8, 16, 64, 256, 1024)


class BucketExplorer(ipywidgets.VBox):
    """Sliders over a figure. Without a front end it leaves the figure of its starting point.

    layers: the model, as the simulator sees it. measured: for each `Pace`, the seconds a step of each cap,
    as {pace: {cap_mb: [seconds, ...]}}; they were measured on `ranks` ranks and are drawn as points.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        ranks: int = 4,
        pace: Pace | None = None,
        measured: Mapping[Pace, Mapping[float, Sequence[float]]] | None = None,
    ) -> None:
        self.layers = list(layers)
        self.measured = dict(measured or {})
        self.measured_ranks = ranks
        start = pace or next(iter(self.measured), Pace(gbps=1, latency_us=50))
        if start.gbps is None:
            raise ValueError("pace has no bandwidth: give the explorer a link, such as Pace(gbps=1)")
        bandwidths = sorted({*GBPS, *(p.gbps for p in [start, *self.measured] if p.gbps)})
        latencies = sorted({*LATENCIES_US, *(p.latency_us for p in [start, *self.measured])})
        self.cap = _slider("bucket_cap_mb", CAPS_MB, 4)
        self.gbps = _slider("Gbit/s", bandwidths, start.gbps)
        self.latency_us = _slider("latency, µs", latencies, start.latency_us)
        self.ranks = _slider("ranks", sorted({*RANKS, ranks}), ranks)
        self.picture = ipywidgets.Image(format="png", layout=ipywidgets.Layout(max_width="900px"))
        controls = [self.cap, self.gbps, self.latency_us, self.ranks]
        super().__init__([ipywidgets.GridBox(controls, layout=_TWO_COLUMNS), self.picture])
        for control in controls:
            control.observe(self._draw, "value")
        self._draw(None)

    def simulation(self, cap_mb: float | None = None) -> Simulation:
        """The step at the sliders' values, or with another cap."""
        cap = self.cap.value if cap_mb is None else cap_mb
        return simulate_step(
            self.layers, self.ranks.value, self.gbps.value, self.latency_us.value, bucket_cap_mb=cap
        )

    def points(self) -> Mapping[float, Sequence[float]]:
        """What was measured on the link and ranks that the sliders show; empty where nothing was."""
        here = Pace(self.gbps.value, self.latency_us.value)
        return self.measured.get(here, {}) if self.ranks.value == self.measured_ranks else {}

    def _draw(self, change: Any) -> None:
        self.picture.value = _picture(self)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**options) or {}
        picture = base64.b64encode(self.picture.value).decode()
        return {**bundle, "image/png": picture, "text/plain": self.text()}

    def text(self) -> str:
        """The starting point in words, for where no picture can be shown."""
        chosen = self.simulation()
        return (
            f"bucket_cap_mb={self.cap.value:g} on {self.ranks.value} ranks at {self.gbps.value:g} Gbit/s, "
            f"{self.latency_us.value:g} µs: {chosen.step_seconds * 1e3:.0f} ms a step, "
            f"{chosen.exposed_seconds * 1e3:.0f} ms of it exposed (modelled)"
        )


def _slider(name: str, values: Sequence[float], value: float) -> ipywidgets.SelectionSlider:
    options = [(f"{v:g}" if isinstance(v, float) else f"{v:,}", v) for v in values]
    return ipywidgets.SelectionSlider(
        options=options, value=value, description=name, style={"description_width": "110px"}
    )


@styled
def _picture(explorer: BucketExplorer) -> bytes:
    """The step at the sliders' values above, and below it how the step depends on the cap."""
    from matplotlib import pyplot

    from course_lib.plots import sweep, timeline

    chosen = explorer.simulation()
    figure = pyplot.figure(figsize=(9, 5.4))
    above = figure.add_axes((0.14, 0.69, 0.83, 0.21))
    below = figure.add_axes((0.14, 0.11, 0.83, 0.36))
    timeline(chosen, above, title=f"One step with bucket_cap_mb={explorer.cap.value:g}")
    points = explorer.points()
    caps = list(points) or list(CAPS_MB)
    sweep(
        caps,
        [points[cap] for cap in caps] if points else None,
        [explorer.simulation(cap).step_seconds for cap in CAPS_MB],
        below,
        modelled_x=CAPS_MB,
        kind="paced",
        title="The step over the cap, on this link",
    )
    below.axvline(explorer.cap.value, color="#999999", linewidth=1, linestyle=":")
    return png(above)


_TWO_COLUMNS = ipywidgets.Layout(grid_template_columns="1fr 1fr", max_width="900px")
