"""Reading machine code (SASS) and PTX: what the loops around the tensor cores do, and what orders shared memory."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=1)  # megabytes of text, which everything here begins with
def instructions(sass: str) -> list[tuple[int, str]]:
    """Address and text."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass, re.MULTILINE)
    return [(int(address, 16), text) for address, text in found]


MASK = 40  # instructions, at least


def product_loops(sass: str) -> list[list[str]]:
    """The innermost loops that have products of matrices (HGMMA)."""
    code = instructions(sass)
    index = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (_, text) in enumerate(code):
        target = re.match(r"@!?U?P\w+ BRA\b.*?0x([0-9a-f]+)", text)  # without a condition: back from code out of line
        start = index.get(int(target.group(1), 16), i) if target else i
        if start < i and any("HGMMA" in line for _, line in code[start:i]):
            loops.append((start, i))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[text for _, text in code[start : stop + 1]] for start, stop in inner]


def hot_path(sass: str, loop: list[str]) -> list[str]:
    """A loop without the stretches that a branch may jump over: masks, which most blocks of keys do not need."""
    code = instructions(sass)
    index = {address: i for i, (address, _) in enumerate(code)}
    texts = [text for _, text in code]
    start = next(i for i in range(len(texts)) if texts[i : i + len(loop)] == loop)
    i, stop, path = start, start + len(loop), []
    while i < stop:
        path.append(texts[i])
        target = re.match(r"@!?U?P\w+ BRA\b.*?0x([0-9a-f]+)", texts[i])
        to = index.get(int(target.group(1), 16), i) if target else i
        i = to if i + MASK <= to < stop else i + 1
    return path


def written(text: str) -> range:
    """The registers that an instruction writes."""
    match = re.match(r"(?:@!?U?P\w+\s+)?(\S+)\s+(?:(?:P\w+|!?PT),\s*)*R(\d+)\b", text)
    if not match or match.group(1).startswith(("ST", "RED", "ATOM", "BAR", "SYNCS", "UTMA", "ISETP", "FSETP", "HGMMA")):
        return range(0)
    size = (
        4 if ".128" in match.group(1) or "M88.4" in match.group(1) else 2 if re.search(r"\.64|WIDE", match.group(1)) else 1
    )
    return range(int(match.group(2)), int(match.group(2)) + size)


def overwritten_operands(sass: str) -> list[str]:
    """Instructions that write a register which a product still reads: it runs on until a wait (DEPBAR) says it is done."""
    running: list[set[int]] = []
    current: set[int] = set()
    found = []
    for _, text in instructions(sass):
        product = re.match(r"(?:@\S+\s+)?HGMMA\S* R\d+, R(\d+),", text)
        if product:
            current |= set(range(int(product.group(1)), int(product.group(1)) + 4))
        if "HGMMA" in text:
            if "gsb0" in text:  # the end of a group of products
                running.append(current)
                current = set()
            continue
        wait = re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x([0-9a-f]+)", text)
        if wait:
            pending = int(wait.group(1), 16)
            running = running[-pending:] if pending else []
        if any(set(written(text)) & registers for registers in [*running, current]):
            found.append(text)
    return found


def arrivals(ptx: str) -> tuple[int, list[str]]:
    """How many arrivals at barriers in shared memory there are, and those before which the warps did not synchronise.

    One thread arrives for all, so what the others did to shared memory must be done: a barrier of the group or of the warp
    stands between the two.
    """
    number, bare, last = 0, [], ""
    for line in map(str.strip, ptx.splitlines()):
        if re.search(r"\b(st|ld)\.shared|\b(ld|st)matrix|wgmma\.wait_group", line):
            last = line
        elif re.search(r"\b(bar|barrier|bar\.warp)\.sync", line):
            last = ""
        elif re.search(r"mbarrier\.arrive\.shared", line):
            number += 1
            if last:
                bare.append(f"{last} ... {line}")
    return number, bare


def memory_order(sass: str) -> str:
    """What a kernel does, as its code lies: B, the next launch may begin; W, wait for the last; L, read; S, write."""
    letters = {"PREEXIT": "B", "ACQBULK": "W", "LDG": "L", "STG": "S"}
    names = (text.split()[1 if text.startswith("@") else 0].split(".")[0] for _, text in instructions(sass))
    return "".join(letters.get(name, "") for name in names)
