"""The stall report: where each rank stood when a job did not end, and what that pattern means."""

from __future__ import annotations

from course_lib.stacks import Standing


def describe_rank(stage: str, finished: bool, standing: Standing | None, failure: str | None) -> str:
    """One rank's line of the report."""
    if failure is not None:
        return failure
    if finished:
        return "finished"
    if stage in ("starting", "importing"):
        return f"still {stage}" + (f": {standing}" if standing else "")
    if standing is None:
        return f"{stage}; it did not answer when asked for its stack"
    return str(standing)


def advise(finished: list[int], standings: dict[int, Standing | None], caller: str = "launch") -> str:
    """What the pattern of a stall means, in one or two sentences, and what to change.

    finished: the ranks whose function returned. standings: of the ranks that still ran. caller: what the
    learner gave the timeout to.
    """
    collectives = {rank: s.collective for rank, s in standings.items() if s is not None and s.collective}
    places = {rank: standings[rank].line() for rank in collectives}  # type: ignore[union-attr]
    computing = [rank for rank in standings if rank not in collectives]
    starting = [
        rank for rank in collectives if (collectives[rank] or "").startswith(("init_process", "new_gr"))
    ]
    if starting and not finished:
        missing = f" {name_ranks(computing, first=True)} never called it." if computing else ""
        return (
            f"{name_ranks(starting, first=True)} waited for the others to join the process group.{missing} "
            "Every rank must call init_process_group, with the same address, port and world size."
        )
    if finished and collectives:
        names = " and ".join(sorted({str(name) for name in collectives.values()}))
        return (
            f"{name_ranks(finished, first=True)} returned while {name_ranks(list(collectives))} "
            f"waited in {names}. "
            "Every rank of a group must make the same collective calls, in the same order: "
            "look for a call that only some ranks reach (an `if rank == 0`, an early return, fewer batches), "
            "or that they make with tensors of different sizes."
        )
    if len(set(collectives.values())) > 1 or (collectives and len(set(places.values())) > 1):
        return (
            "The ranks wait in different calls. Every rank of a group must make the same collective calls, "
            "in the same order: compare the lines above."
        )
    if collectives and computing:
        return (
            f"{name_ranks(list(collectives), first=True)} waited for {name_ranks(computing)}, not there yet. "
            f"If that work simply takes long, give {caller} a larger timeout."
        )
    if collectives:
        return (
            "All ranks wait in the same call. Either it needs longer than this timeout (a large tensor on a "
            "slow link), or the ranks disagree on shape, dtype, root rank or group."
        )
    return f"No rank was waiting for another. If the work simply takes long, give {caller} a larger timeout."


def name_ranks(ranks: list[int], first: bool = False) -> str:
    """Ranks in words, such as "ranks 0, 2 and 3"; with a capital at the beginning of a sentence."""
    text = "rank " if len(ranks) == 1 else "ranks " + ", ".join(map(str, sorted(ranks)[:-1])) + " and "
    text += str(max(ranks))
    return text.capitalize() if first else text
