"""Edits anchored in a definition find their place whatever is around it, or say that it is gone."""

from __future__ import annotations

import pytest
from anchors import AnchorError, replaced

MODULE = """
from names import Beta, Alpha as First
CHOICES: tuple[str, ...] = ("alpha", "beta")


def shared(one: str) -> str: ...
class Reader:
    @property
    def size(self) -> int:
        return self.add(1, 2)

    def read(self) -> int:
        total = self.add(
            1,
            2,
        )
        return total
"""


@pytest.mark.parametrize(
    ("definition", "old", "new", "line"),
    [
        ("CHOICES", '"beta"', '"beta", "gamma"', '= ("alpha", "beta", "gamma")'),
        ("First", "Beta", "Beta, Gamma", "import Beta, Gamma, Alpha as First"),
        ("Reader.read", "self.add(1, 2)", "3", "        total = 3\n        return"),
        (
            "Reader.size",
            "return self.add(1,2)",
            "  if a:\n      b()",
            "    if a:\n            b()\n",
        ),
        ("Reader.size", "@property", "@cached", "    @cached\n    def size"),
        ("Reader", "return total", "", "        )\n        \n"),
        ("", "str: ...", "str: pass", "-> str: pass\n"),
    ],
)
def test_a_text_is_found_in_its_definition(definition: str, old: str, new: str, line: str) -> None:
    """White space does not count, other definitions neither, and the new lines are indented."""
    assert line in replaced(MODULE, definition, old, new)
    assert line in replaced(f"import sys\nOTHER = CHOICES\n{MODULE}", definition, old, new)


@pytest.mark.parametrize(
    ("definition", "old", "said"),
    [
        ("Reader.read", "property", "0 times"),
        ("shared", "on", "0 times"),
        ("", "total", "2 times in the module"),
        ("Reader.gone", "total", "there is no Reader.gone"),
    ],
)
def test_what_does_not_fit_is_named(definition: str, old: str, said: str) -> None:
    """Parts of words and texts of other definitions are no match."""
    with pytest.raises(AnchorError, match=said):
        replaced(MODULE, definition, old, "")
