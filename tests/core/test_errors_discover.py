"""Errors say what, where and what to do; registries are folders."""

import inspect
import pickle

import pytest

from mmcompile.core import errors
from mmcompile.core.discover import list_names, load_module
from mmcompile.core.errors import LoweringError, MMError, UsageError, unknown_name

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, MMError)]


def test_message_holds_what_where_and_fix():
    assert str(MMError("the door is shut")) == "the door is shut."
    assert str(MMError("the door is shut", where="house.py:3", fix="open it")) == (
        "the door is shut (at house.py:3); open it."
    )


def test_exit_codes_are_distinct_and_never_zero():
    codes = [c.exit_code for c in CLASSES]
    assert len(set(codes)) == len(codes) == 9
    assert 0 not in codes


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_cross_processes(cls):
    error = pickle.loads(pickle.dumps(cls("what", where="where", fix="fix")))
    assert type(error) is cls
    assert (error.what, error.where, error.fix, str(error)) == ("what", "where", "fix", "what (at where); fix.")


def test_unknown_name_suggests_the_closest():
    error = unknown_name("target", "sm10", ["sm100", "gfx950"], where="cli")
    assert isinstance(error, UsageError)
    assert str(error) == "unknown target 'sm10' (at cli); did you mean 'sm100'."


def test_unknown_name_lists_what_is_known():
    assert str(unknown_name("target", "zebra", ["b", "a"])) == "unknown target 'zebra'; known: a, b."
    assert str(unknown_name("target", "zebra", [])) == "unknown target 'zebra'; known: none."


def test_list_names_hides_private_modules():
    names = list_names("passes")
    assert names == sorted(names)
    assert "pipeline" in names
    assert not any(name.startswith("_") for name in names)


def test_load_module_by_file_name():
    assert load_module("passes.quant", "nvfp4").__name__ == "mmcompile.passes.quant.nvfp4"


@pytest.mark.parametrize("name", ["nvfp", "__init__", "..core.plan", "_edit", ""])
def test_load_module_refuses_other_names(name):
    with pytest.raises(UsageError, match="unknown quant"):
        load_module("passes.quant", name)


def test_load_module_did_you_mean():
    with pytest.raises(UsageError, match="did you mean 'nvfp4'"):
        load_module("passes.quant", "nvpf4")


def test_lowering_error_is_no_usage_error():
    with pytest.raises(LoweringError) as caught:
        raise LoweringError("no kernel")
    assert not isinstance(caught.value, UsageError)
