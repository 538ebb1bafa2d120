"""Runner for transcripts: expected behaviour as text, checked line by line.

A transcript is a text file of blocks, separated by blank lines:

    # Comment lines may be anywhere, between and in blocks.
    input line
    input line
    ----
    output line

`check_transcript` passes the input lines of each block to a function and compares its
result with the output lines. With METAQ_REWRITE=1 in the environment it writes the
result into the file instead; review the diff.
"""

import os
from collections.abc import Callable
from pathlib import Path

REWRITE_SWITCH = "METAQ_REWRITE"
SEPARATOR = "----"

Execute = Callable[[list[str]], list[str]]
"""Takes the input lines of a block; returns its output lines, none of them blank."""


def check_transcript(path: Path, execute: Execute) -> None:
    """Run all blocks of a transcript; rewrite it if METAQ_REWRITE=1.

    Raises:
        AssertionError: the output of a block differs; the message has both outputs
            and the line number of the block.
    """
    blocks = path.read_text(encoding="utf-8").split("\n\n")
    rewritten, line_number, differences = [], 1, []
    for block in blocks:
        answered = _answer(block.strip("\n"), execute)
        if answered != block.strip("\n"):
            differences.append(
                f"{path.name}:{line_number}\n--- file says\n{block}\n"
                f"--- code says\n{answered}"
            )
        rewritten.append(answered)
        line_number += block.count("\n") + 2
    if differences and os.environ.get(REWRITE_SWITCH) == "1":
        path.write_text("\n\n".join(rewritten) + "\n", encoding="utf-8")
    else:
        assert not differences, "\n\n".join(differences)


def _answer(block: str, execute: Execute) -> str:
    """Return the block with the present output."""
    lines = block.split("\n")
    is_comment = [line.startswith("#") for line in lines]
    if all(is_comment) or not block:
        return block
    cut = lines.index(SEPARATOR) if SEPARATOR in lines else len(lines)
    head = lines[:cut]
    output = execute([line for line in head if not line.startswith("#")])
    assert all(output), "a blank output line would end the block"
    return "\n".join([*head, SEPARATOR, *output])
