"""Which member of a kernel a program belongs to, as Triton text: scalar branches at whose ends stand a member's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def choose(firsts: Sequence[int], choices: Mapping[str, Sequence[str]], prefix: str) -> tuple[list[str], dict[str, str]]:
    """Statements that choose a member by a program's number, ``program``, and the names of what they have chosen: of the
    member's first program, by "first", and of each of `choices`. These have a text for each member; one that is the same for
    all is its own name. `firsts` are the members' first programs, ascending. No other name begins with `prefix`.

    A tree of depth log2(members): a few branches, the same for all threads of a program."""
    if len(firsts) == 1:
        return [], {"first": str(firsts[0]), **{name: texts[0] for name, texts in choices.items()}}
    variables = {name: f"{prefix}_{name}" for name, texts in choices.items() if len(set(texts)) > 1}
    first = f"{prefix}_first"

    def below(low: int, high: int) -> list[str]:
        if high - low == 1:
            leaf = [f"{first} = lib.branch_constant({firsts[low]}, program)"]
            return leaf + [f"{variable} = {choices[name][low]}" for name, variable in variables.items()]
        middle = (low + high) // 2
        left, right = (["    " + line for line in below(*half)] for half in ((low, middle), (middle, high)))
        return [f"if program < {firsts[middle]}:", *left, "else:", *right]

    chosen = {name: variables.get(name, texts[0]) for name, texts in choices.items()}
    return below(0, len(firsts)), {"first": first, **chosen}
