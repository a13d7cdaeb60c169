"""What DDP itself logs about its buckets and times: a prototype interface of PyTorch's, used only here."""

from __future__ import annotations

from typing import Any


def ddp_log(model: Any) -> dict[str, Any]:
    """What DDP knows of itself, from `DistributedDataParallel._get_ddp_logging_data`.

    Returns "buckets": the bytes of each bucket before they were rebuilt, "rebuilt_buckets": after (empty
    until the second iteration has begun), "bucket_cap_bytes", and "iterations". Raises TypeError for a model
    that is not wrapped in DDP.
    """
    if not hasattr(model, "_get_ddp_logging_data"):
        raise TypeError(f"a {type(model).__name__} keeps no DDP log: pass the DistributedDataParallel model")
    data = model._get_ddp_logging_data()
    return {
        "buckets": _sizes(data.get("bucket_sizes", "")),
        "rebuilt_buckets": _sizes(data.get("rebuilt_bucket_sizes", "")),
        "bucket_cap_bytes": data.get("bucket_cap_bytes"),
        "iterations": data.get("iteration", 0),
    }


def _sizes(listed: str) -> list[int]:
    return [int(size) for size in listed.split(",") if size.strip()]
