"""From wrong results to a sentence: which rank and part is wrong, and which mistake that looks like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_lib.check.compare import equal, kind, leaves, mismatch, shown, vector
from course_lib.check.signatures import Evidence, Signature, recognise
from course_lib.check.trouble import NotYet


def diagnose(
    got: list[Any],
    expected: list[Any],
    what: str,
    local: Sequence[Any] | None = None,
    inputs: Sequence[Any] | None = None,
    signatures: Sequence[Signature] = (),
    rtol: float | None = None,
    atol: float | None = None,
) -> NotYet | None:
    """What is wrong with the results of a job, by rank; None where nothing is. See `Lab.same`."""
    own = _recognised(got, expected, None, local, inputs, signatures, library=False)
    for rank, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
        found = mismatch(mine, wanted)
        if found is not None:
            diagnosis, says, _ = found
            if own is not None:
                diagnosis, says = own
            return NotYet(
                diagnosis,
                says,
                expected=f"{what}: {kind(wanted)}",
                got=f"{kind(mine)}: {shown(mine)}",
                rank=rank if len(got) > 1 else None,
            )
    wrong = [
        (rank, where, mine, wanted)
        for rank in range(len(got))
        for (where, mine), (_, wanted) in zip(leaves(got[rank]), leaves(expected[rank]), strict=True)
        if not equal(mine, wanted, rtol, atol)
    ]
    if not wrong:
        return None
    rank, where, mine, wanted = wrong[0]
    parts = {place for _, place, _, _ in wrong}
    total = {place for value in expected for place, _ in leaves(value)}
    known = own or _recognised(got, expected, None, local, inputs, signatures)
    prefix = ""
    if parts != total:
        prefix = f"Right but for {_listed(sorted(parts))}. "
        known = known or _recognised(got, expected, parts, local, inputs, signatures)
    diagnosis, says = known or ("wrong values", f"The values are not those of {what}.")
    at = rank if len(got) > 1 else None
    name = f"{what}{where}" if where else what
    return NotYet(diagnosis, prefix + says, expected=f"{name}: {shown(wanted)}", got=shown(mine), rank=at)


def _recognised(
    got: list[Any],
    expected: list[Any],
    parts: set[str] | None,
    local: Sequence[Any] | None,
    inputs: Sequence[Any] | None,
    signatures: Sequence[Signature],
    library: bool = True,
) -> tuple[str, str] | None:
    """The mistake that all values, or those of `parts`, look like."""

    def vectors(values: Sequence[Any] | None) -> list[Any] | None:
        if values is None:
            return None
        chosen = [
            value if parts is None else [leaf for where, leaf in leaves(value) if where in parts]
            for value in values
        ]
        found = [vector(value) for value in chosen]
        return None if any(value is None for value in found) else found

    mine, wanted = vectors(got), vectors(expected)
    if mine is None or wanted is None:
        return None
    evidence = Evidence(mine, wanted, vectors(local), vectors(inputs))
    if library:
        return recognise(evidence, signatures)
    for signature in signatures:
        # An answer of the wrong shape may still be a mistake that the exercise knows by its values.
        says = signature.recognise(evidence)
        if says and not all(map(_same_values, mine, wanted)):
            return signature.key, says
    return None


def _same_values(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _listed(parts: list[str]) -> str:
    names = [part.strip("[]'\"") or "the value" for part in parts]
    text = ", ".join(f"`{name}`" for name in names[:4])
    return text + (f" and {len(names) - 4} more" if len(names) > 4 else "")
