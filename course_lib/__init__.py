"""The helper library of the DP-to-DDP workbook: launch real jobs, pace them, see where the time went."""

from course_lib import magic
from course_lib.failures import JobInterrupted, JobTimeout, RankError
from course_lib.launch import last_run, launch
from course_lib.pace import Pace
from course_lib.probe import probe, span
from course_lib.session import Ranks

magic.register()

__all__ = [
    "JobInterrupted",
    "JobTimeout",
    "Pace",
    "RankError",
    "Ranks",
    "last_run",
    "launch",
    "probe",
    "span",
]
