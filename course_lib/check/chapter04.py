"""The exercises of chapter 04: DDP's buckets, overlap by hand, a cap for a link."""

from course_lib.check.chapter04_buckets import judge_bucket_sizes
from course_lib.check.chapter04_cap import judge_cap
from course_lib.check.chapter04_overlap import judge_overlap

__all__ = ["judge_bucket_sizes", "judge_cap", "judge_overlap"]
