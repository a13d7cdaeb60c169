"""The exercises of chapter 01: scatter and gather, the byte ledger, and a reduction that is missing."""

from course_lib.check.chapter01_ledger import judge_ledger
from course_lib.check.chapter01_reduction import judge_reduction
from course_lib.check.chapter01_scatter import judge_scatter_and_gather

__all__ = ["judge_ledger", "judge_reduction", "judge_scatter_and_gather"]
