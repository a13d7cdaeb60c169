"""A kernel that loaded an older library than the one on disk is told to restart."""

from __future__ import annotations

import os

import pytest

from course_lib import freshness, launch


@pytest.fixture
def other_library(tmp_path, monkeypatch):
    """A library of one module, `spans`, which this process counts as loaded."""
    module = tmp_path / "spans.py"
    module.write_text("a = 1\n")
    monkeypatch.setattr(freshness, "LIBRARY", tmp_path)
    loaded = {"spans.py": (freshness._stamp(module), freshness._content(module))}
    monkeypatch.setattr(freshness, "_loaded", loaded)
    return module


def test_an_unchanged_library_is_fresh(other_library):
    assert freshness.changed_modules() == []


def test_a_file_that_was_only_touched_is_fresh(other_library):
    os.utime(other_library, ns=(1, 1))
    assert freshness.changed_modules() == []


def test_a_launch_with_a_changed_library_says_to_restart_the_kernel(other_library):
    other_library.write_text("a = 2\n")
    with pytest.raises(freshness.StaleLibrary, match=r"spans.*Restart the kernel"):
        launch(int, 1)


def test_a_module_that_is_not_loaded_may_change(other_library):
    extra = other_library.with_name("never_loaded.py")
    extra.write_text("a = 1\n")
    freshness._loaded["never_loaded.py"] = ((0, 0), "")
    assert freshness.changed_modules() == []
