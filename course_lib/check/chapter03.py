"""The exercises of chapter 03: a ring's two halves, where it crosses the star, and a pipelined ring."""

from course_lib.check.chapter03_link import judge_crossing, judge_pipelined
from course_lib.check.chapter03_ring import judge_all_gather, judge_reduce_scatter

__all__ = ["judge_all_gather", "judge_crossing", "judge_pipelined", "judge_reduce_scatter"]
