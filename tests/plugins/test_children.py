"""A child that is asked again and again, and replaced when it does not answer."""

from __future__ import annotations

import sys

import pytest
from tmd_detectors.children import AskedChild, Ended, Hung

COUNTS = "import os\nn = 0\nwhile os.read(0, 1): n += 1; print(n, flush=True)"
WRONG = {
    "import os; os.read(0, 1)": "the child ended: it closed its output",
    "print('[]', flush=True); import os; os.read(0, 9)": "the child ended: Expected `int`",
    "print('9' * (1 << 23), flush=True)": "the child ended: its answer is too long",
}


def asked(*codes: str) -> AskedChild[int]:
    """Each child runs the next of ``codes``."""
    left = iter(codes)
    return AskedChild("the child", lambda: [sys.executable, "-S", "-c", next(left)], int)


async def test_one_child_answers_as_long_as_it_can() -> None:
    child = asked(COUNTS, COUNTS)
    first = [await child.ask(60), await child.ask(60)]
    await child.close()
    again = await child.ask(60)
    await child.close()

    assert (first, again) == ([1, 2], 1)


@pytest.mark.parametrize(("code", "words"), WRONG.items(), ids=["ends", "lies", "floods"])
async def test_one_with_a_wrong_answer_is_replaced(code: str, words: str) -> None:
    child = asked(code, COUNTS)
    with pytest.raises(Ended, match=words):
        await child.ask(60)

    assert await child.ask(60) == 1
    await child.close()


async def test_one_that_does_not_answer_is_replaced_without_a_wait_for_its_end() -> None:
    child = asked("import signal; signal.pause()", COUNTS)
    with pytest.raises(Hung, match=r"the driver did not answer within 0\.1 s"):
        await child.ask(0.1)

    assert await child.ask(60) == 1
    await child.close()


async def test_one_that_cannot_be_started_is_an_error() -> None:
    child = AskedChild("the child", lambda: ["/nowhere"], int)

    with pytest.raises(Ended, match=r"the child does not start: .*No such file"):
        await child.ask(60)
    await child.close()
