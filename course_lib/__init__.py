"""The helper library of the DP-to-DDP workbook: launch real jobs, pace them, see where the time went."""
