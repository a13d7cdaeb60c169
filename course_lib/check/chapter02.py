"""The exercises of chapter 02: a group and its clean-up, a broadcast at the start, and a DDP by hand."""

from course_lib.check.chapter02_ddp import judge_naive_ddp
from course_lib.check.chapter02_group import judge_in_group
from course_lib.check.chapter02_start import judge_synchronise

__all__ = ["judge_in_group", "judge_naive_ddp", "judge_synchronise"]
